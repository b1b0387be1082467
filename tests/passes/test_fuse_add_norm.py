import pytest
import torch

from dsa_compile.passes.fuse_add_norm import FuseAddNorm
from tests.passes.conftest import PassCheck
from tests.passes.sketch import Sketch, region, value, weight

aten, dsa = torch.ops.aten, torch.ops.dsa

OUTPUTS = ("normed", "sum")


def inputs(dtype: torch.dtype = torch.float32):
    return (
        value("residual", "T", 32, dtype=dtype),
        value("x", "T", 32, dtype=dtype),
        weight("norm.weight", 32, dtype=dtype),
    )


def separate(dtype: torch.dtype = torch.float32, alpha: float = 1) -> Sketch:
    @region("dense", *inputs(dtype), outputs=OUTPUTS, path="mlp")
    def before(residual, x, w):
        total = aten.add.Tensor(residual, x, alpha=alpha)
        return dsa.rms_norm.default(total, w, 1e-6), total

    return before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sum_and_norm_become_one_op(check: PassCheck, dtype: torch.dtype) -> None:
    @region("dense", *inputs(dtype), outputs=OUTPUTS)
    def expected(residual, x, w):
        pair = dsa.add_rms_norm.default(x, residual, w, 1e-6)
        return pair[0], pair[1]

    check(FuseAddNorm(), separate(dtype), expected)


def test_the_sum_need_not_be_used_elsewhere(check: PassCheck) -> None:
    @region("dense", *inputs())
    def before(residual, x, w):
        return dsa.rms_norm.default(aten.add.Tensor(residual, x), w, 1e-6)

    @region("dense", *inputs())
    def expected(residual, x, w):
        return dsa.add_rms_norm.default(x, residual, w, 1e-6)[0]

    check(FuseAddNorm(), before, expected)


def test_declines_a_scaled_sum(check: PassCheck) -> None:
    assert check.declines(FuseAddNorm(), separate(alpha=2)) == (
        "pass fuse_add_norm: matched 0 of 1 sites in 'dense' (2 layers); nearest miss: "
        "mlp: node add_tensor: argument alpha=2 is not the default"
    )


def test_declines_a_sum_with_a_constant(check: PassCheck) -> None:
    @region("dense", *inputs(), path="mlp")
    def before(residual, x, w):
        return dsa.rms_norm.default(aten.add.Tensor(residual, 1.0), w, 1e-6)

    assert "'x' should be a node, found 1.0" in check.declines(FuseAddNorm(), before)


def test_declines_differently_typed_summands(check: PassCheck) -> None:
    residual, _, w = inputs()
    x = value("x", "T", 32, dtype=torch.bfloat16)

    @region("dense", residual, x, w, outputs=OUTPUTS, path="mlp")
    def before(residual, x, w):
        total = aten.add.Tensor(residual, x)
        return dsa.rms_norm.default(total, w, 1e-6), total

    message = check.declines(FuseAddNorm(), before)
    assert message.endswith("mlp: node add_tensor: adds bfloat16[T, 32] to float32[T, 32]")


def test_declines_a_broadcast(check: PassCheck) -> None:
    residual, _, w = inputs()

    @region("dense", residual, value("x", 1, 32), w, outputs=OUTPUTS, path="mlp")
    def before(residual, x, w):
        total = aten.add.Tensor(residual, x)
        return dsa.rms_norm.default(total, w, 1e-6), total

    assert "adds float32[1, 32] to float32[T, 32]" in check.declines(FuseAddNorm(), before)
