import pytest
import torch

from dsa_compile.passes.fuse_norm_quantize import FuseNormQuantize
from tests.passes.conftest import PassCheck
from tests.passes.sketch import Sketch, region, value, weight

dsa = torch.ops.dsa

WIDTH, EPS = 160, 1e-6  # a whole block and a partial one
ROUNDING = 2e-3  # an e4m3 value here and there on the other side of a tie


def inputs(dtype: torch.dtype = torch.float32, of_weight: torch.dtype | None = None):
    return value("x", "T", WIDTH, dtype=dtype), weight("n.weight", WIDTH, dtype=of_weight or dtype)


def separate(*given, ue8m0: bool = False, keep: bool = False) -> Sketch:
    outputs = ("q", "scale", "normed") if keep else ("q", "scale")

    @region("dense", *given, outputs=outputs, path="q_a_layernorm")
    def before(x, w):
        normed = dsa.rms_norm.default(x, w, EPS)
        pair = dsa.quantize_blocks.default(normed, ue8m0)
        return (pair[0], pair[1], normed) if keep else (pair[0], pair[1])

    return before


@pytest.mark.parametrize("ue8m0", [False, True])
def test_norm_and_quantisation_become_one_op(check: PassCheck, ue8m0: bool) -> None:
    @region("dense", *inputs(), outputs=("q", "scale"))
    def expected(x, w):
        pair = dsa.rms_norm_quantize.default(x, w, EPS, ue8m0)
        return pair[0], pair[1]

    check(FuseNormQuantize(), separate(*inputs(), ue8m0=ue8m0), expected, relative=ROUNDING)


def test_a_norm_that_is_read_elsewhere_is_kept(check: PassCheck) -> None:
    @region("dense", *inputs(), outputs=("q", "scale", "normed"))
    def expected(x, w):
        parts = dsa.rms_norm_quantize_keep.default(x, w, EPS, False)
        return parts[1], parts[2], parts[0]

    check(FuseNormQuantize(), separate(*inputs(), keep=True), expected, relative=ROUNDING)


def test_in_bf16_only_the_rounding_differs(check: PassCheck) -> None:
    given = inputs(torch.bfloat16)

    @region("dense", *given, outputs=("q", "scale", "normed"))
    def expected(x, w):
        parts = dsa.rms_norm_quantize_keep.default(x, w, EPS, False)
        return parts[1], parts[2], parts[0]

    check(FuseNormQuantize(), separate(*given, keep=True), expected, relative=0.03)


def test_declines_a_weight_that_promotes(check: PassCheck) -> None:
    given = inputs(torch.bfloat16, torch.float32)
    assert check.declines(FuseNormQuantize(), separate(*given)) == (
        "pass fuse_norm_quantize: matched 0 of 1 sites in 'dense' (2 layers); nearest miss: "
        f"q_a_layernorm: node rms_norm_default: makes float32[T, {WIDTH}] of bfloat16[T, {WIDTH}]"
    )


def test_declines_another_op_in_front(check: PassCheck) -> None:
    @region("dense", *inputs(), outputs=("q", "scale"), path="o_proj")
    def before(x, w):
        pair = dsa.quantize_blocks.default(torch.ops.aten.mul.Tensor(x, w), False)
        return pair[0], pair[1]

    message = check.declines(FuseNormQuantize(), before)
    assert message.endswith("calls aten.mul.Tensor where dsa.rms_norm.default was expected")
