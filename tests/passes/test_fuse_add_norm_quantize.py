import pytest
import torch

from dsa_compile.passes.fuse_add_norm_quantize import FuseAddNormQuantize
from tests.passes.conftest import PassCheck
from tests.passes.sketch import Sketch, region, value, weight

aten, dsa = torch.ops.aten, torch.ops.dsa

WIDTH, EPS = 160, 1e-6
OUTPUTS = ("q", "scale", "normed", "sum")


def inputs(dtype: torch.dtype = torch.float32, of_weight: torch.dtype | None = None):
    return (
        value("residual", "T", WIDTH, dtype=dtype),
        value("x", "T", WIDTH, dtype=dtype),
        weight("norm.weight", WIDTH, dtype=of_weight or dtype),
    )


def separate(*given) -> Sketch:
    @region("dense", *given, outputs=OUTPUTS, path="post_attention_layernorm")
    def before(residual, x, w):
        pair = dsa.add_rms_norm.default(x, residual, w, EPS)
        normed = pair[0]
        quantized = dsa.quantize_blocks.default(normed, False)
        return quantized[0], quantized[1], normed, pair[1]

    return before


# bf16: the fused op normalises the sum before it is rounded
@pytest.mark.parametrize(("dtype", "relative"), [(torch.float32, 2e-3), (torch.bfloat16, 0.03)])
def test_sum_norm_and_quantisation_become_one_op(check: PassCheck, dtype, relative) -> None:
    given = inputs(dtype)

    @region("dense", *given, outputs=OUTPUTS)
    def expected(residual, x, w):
        parts = dsa.add_rms_norm_quantize.default(x, residual, w, EPS, False)
        return parts[1], parts[2], parts[0], parts[3]

    check(FuseAddNormQuantize(), separate(*given), expected, relative=relative)


def test_the_sum_and_the_norm_need_not_be_used_elsewhere(check: PassCheck) -> None:
    @region("dense", *inputs(), outputs=("q", "scale"))
    def before(residual, x, w):
        pair = dsa.add_rms_norm.default(x, residual, w, EPS)
        quantized = dsa.quantize_blocks.default(pair[0], True)
        return quantized[0], quantized[1]

    @region("dense", *inputs(), outputs=("q", "scale"))
    def expected(residual, x, w):
        parts = dsa.add_rms_norm_quantize.default(x, residual, w, EPS, True)
        return parts[1], parts[2]

    check(FuseAddNormQuantize(), before, expected, relative=2e-3)


def test_declines_a_weight_of_another_dtype(check: PassCheck) -> None:
    given = inputs(torch.bfloat16, torch.float32)
    assert check.declines(FuseAddNormQuantize(), separate(*given)) == (
        "pass fuse_add_norm_quantize: matched 0 of 1 sites in 'dense' (2 layers); nearest miss: "
        "post_attention_layernorm: node add_rms_norm_default: adds and scales tensors that differ "
        "in dtype: ['bfloat16', 'float32']"
    )


def test_declines_the_quantised_sum(check: PassCheck) -> None:
    @region("dense", *inputs(), outputs=("q", "scale"), path="mlp")
    def before(residual, x, w):
        pair = dsa.add_rms_norm.default(x, residual, w, EPS)
        quantized = dsa.quantize_blocks.default(pair[1], False)
        return quantized[0], quantized[1]

    message = check.declines(FuseAddNormQuantize(), before)
    assert message.endswith("mlp: node getitem: found 1 where 0 was expected")
