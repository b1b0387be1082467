import pytest
import torch

from dsa_compile.passes.recognize_rope_tables import RecognizeRopeTables
from tests.passes.conftest import PassCheck
from tests.passes.sketch import batch, region, weight

aten, dsa = torch.ops.aten, torch.ops.dsa

INPUTS = (batch("positions", "B", "S"), weight("rotary_emb.inv_freq", 4))
POSITIONS = torch.arange(24).view(2, 12) * 37


def angles(positions, inv_freq):
    wide = aten.to.dtype(aten.unsqueeze.default(positions, 2), torch.float32)
    freqs = aten.mul.Tensor(wide, inv_freq)
    return aten.cat.default([freqs, freqs], -1)


@pytest.mark.parametrize("scaling", [1.0, 1.3688879454113936])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_pair_becomes_one_op(check: PassCheck, scaling: float, dtype: torch.dtype) -> None:
    def rounded(x):
        return x if dtype is torch.float32 else aten.to.dtype(x, dtype)

    @region("embed", *INPUTS, outputs=("cos", "sin"))
    def before(positions, inv_freq):
        both = angles(positions, inv_freq)
        cos = aten.mul.Tensor(aten.cos.default(both), scaling)
        sin = aten.mul.Tensor(aten.sin.default(both), scaling)
        return rounded(cos), rounded(sin)

    @region("embed", *INPUTS, outputs=("cos", "sin"))
    def expected(positions, inv_freq):
        pair = dsa.rope_tables.default(positions, inv_freq, scaling, dtype)
        return pair[0], pair[1]

    check(RecognizeRopeTables(), before, expected, inputs={"positions": POSITIONS})


def test_declines_different_scaling(check: PassCheck) -> None:
    @region("embed", *INPUTS, outputs=("cos", "sin"), path="rotary_emb")
    def before(positions, inv_freq):
        both = angles(positions, inv_freq)
        cos = aten.mul.Tensor(aten.cos.default(both), 1.0)
        return cos, aten.mul.Tensor(aten.sin.default(both), 2.0)

    assert check.declines(RecognizeRopeTables(), before) == (
        "pass recognize_rope_tables: matched 0 of 1 sites in 'embed' (1 layers); nearest miss: "
        "rotary_emb: node mul_tensor_2: cosine and sine differ in angle or scaling"
    )


def test_declines_cosine_and_sine_of_different_angles(check: PassCheck) -> None:
    other = batch("others", "B", "S")

    @region("embed", *INPUTS, other, outputs=("cos", "sin"), path="rotary_emb")
    def before(positions, inv_freq, others):
        cos = aten.mul.Tensor(aten.cos.default(angles(positions, inv_freq)), 1.0)
        return cos, aten.mul.Tensor(aten.sin.default(angles(others, inv_freq)), 1.0)

    message = check.declines(RecognizeRopeTables(), before)
    assert "cosine and sine differ in angle or scaling" in message


def test_declines_an_angle_without_its_double(check: PassCheck) -> None:
    @region("embed", *INPUTS, outputs=("cos", "sin"), path="rotary_emb")
    def before(positions, inv_freq):
        wide = aten.to.dtype(aten.unsqueeze.default(positions, 2), torch.float32)
        freqs = aten.mul.Tensor(wide, inv_freq)
        cos = aten.mul.Tensor(aten.cos.default(freqs), 1.0)
        return cos, aten.mul.Tensor(aten.sin.default(freqs), 1.0)

    message = check.declines(RecognizeRopeTables(), before)
    assert "rotary_emb: node mul_tensor: calls aten.mul.Tensor where aten.cat.default" in message
