import torch

from dsa_compile.passes.recognize_rms_norm import RecognizeRmsNorm
from tests.passes.conftest import PassCheck
from tests.passes.sketch import region, value, weight

aten, dsa = torch.ops.aten, torch.ops.dsa

INPUTS = (value("x", "B", "S", 64), weight("norm.weight", 64))


def norm(x, weight, dims=(-1,)):
    variance = aten.mean.dim(aten.pow.Tensor_Scalar(x, 2), list(dims), True)
    scale = aten.rsqrt.default(aten.add.Tensor(variance, 1e-6))
    return aten.mul.Tensor(weight, aten.mul.Tensor(x, scale))


@region("head", *INPUTS)
def expected(x, weight):
    return dsa.rms_norm.default(x, weight, 1e-6)


def test_becomes_one_op(check: PassCheck) -> None:
    @region("head", *INPUTS)
    def before(x, weight):
        return norm(x, weight)

    check(RecognizeRmsNorm(), before, expected)


def test_either_order_of_the_products(check: PassCheck) -> None:
    @region("head", *INPUTS)
    def before(x, weight):
        variance = aten.mean.dim(aten.pow.Tensor_Scalar(x, 2), [-1], True)
        scale = aten.rsqrt.default(aten.add.Tensor(variance, 1e-6))
        return aten.mul.Tensor(aten.mul.Tensor(scale, x), weight)

    check(RecognizeRmsNorm(), before, expected)


def test_rounds_before_the_weight_in_bf16(check: PassCheck) -> None:
    inputs = (
        value("x", "B", "S", 64, dtype=torch.bfloat16),
        weight("norm.weight", 64, dtype=torch.bfloat16),
    )

    @region("head", *inputs)
    def before(x, weight):
        wide = aten.to.dtype(x, torch.float32)
        variance = aten.mean.dim(aten.pow.Tensor_Scalar(wide, 2), [-1], True)
        scale = aten.rsqrt.default(aten.add.Tensor(variance, 1e-6))
        normed = aten.to.dtype(aten.mul.Tensor(wide, scale), torch.bfloat16)
        return aten.mul.Tensor(weight, normed)

    @region("head", *inputs)
    def expected(x, weight):
        return dsa.rms_norm.default(x, weight, 1e-6)

    check(RecognizeRmsNorm(), before, expected)


def test_declines_a_rounding_that_the_op_has_not(check: PassCheck) -> None:
    @region("head", *INPUTS, path="norm")
    def before(x, weight):
        variance = aten.mean.dim(aten.pow.Tensor_Scalar(x, 2), [-1], True)
        scale = aten.rsqrt.default(aten.add.Tensor(variance, 1e-6))
        normed = aten.to.dtype(aten.mul.Tensor(x, scale), torch.bfloat16)
        return aten.mul.Tensor(weight, normed)

    message = check.declines(RecognizeRmsNorm(), before)
    assert "multiplies the weight by torch.bfloat16, the input is torch.float32" in message


def test_declines_a_mean_over_other_dimensions(check: PassCheck) -> None:
    @region("head", *INPUTS, path="norm")
    def before(x, weight):
        return norm(x, weight, dims=(1,))

    assert check.declines(RecognizeRmsNorm(), before) == (
        "pass recognize_rms_norm: matched 0 of 1 sites in 'head' (1 layers); "
        "nearest miss: norm: node mean_dim: found 1 where -1 was expected"
    )


def test_declines_an_intermediate_used_elsewhere(check: PassCheck) -> None:
    @region("head", *INPUTS, outputs=("logits", "logits"), path="norm")
    def before(x, weight):
        variance = aten.mean.dim(aten.pow.Tensor_Scalar(x, 2), [-1], True)
        scale = aten.rsqrt.default(aten.add.Tensor(variance, 1e-6))
        return aten.mul.Tensor(weight, aten.mul.Tensor(x, scale)), aten.neg.default(scale)

    message = check.declines(RecognizeRmsNorm(), before)
    assert "norm: node rsqrt_default: extra user neg_default outside the match" in message
