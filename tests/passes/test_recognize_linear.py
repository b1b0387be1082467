import torch

from dsa_compile.passes.recognize_linear import RecognizeLinear
from tests.passes.conftest import PassCheck
from tests.passes.sketch import region, value, weight

aten, dsa = torch.ops.aten, torch.ops.dsa

INPUTS = (value("hidden", "B", "S", 8), weight("lm_head.weight", 16, 8))


def test_becomes_one_op(check: PassCheck) -> None:
    @region("head", *INPUTS)
    def before(x, w):
        return aten.linear.default(x, w)

    @region("head", *INPUTS)
    def expected(x, w):
        return dsa.linear.default(x, w)

    check(RecognizeLinear(), before, expected)


def test_declines_a_bias(check: PassCheck) -> None:
    @region("head", *INPUTS, weight("lm_head.bias", 16), path="lm_head")
    def before(x, w, bias):
        return aten.linear.default(x, w, bias)

    message = check.declines(RecognizeLinear(), before)
    assert message.endswith(
        "lm_head: node linear_default: argument bias=lm_head_bias is not the default"
    )


def test_declines_a_computed_weight(check: PassCheck) -> None:
    @region("head", *INPUTS, path="lm_head")
    def before(x, w):
        return aten.linear.default(x, aten.neg.default(w))

    message = check.declines(RecognizeLinear(), before)
    assert message.endswith("node neg_default: 'weight': neg_default is not a parameter")


def test_counts_the_projections_of_a_layer(check: PassCheck) -> None:
    @region("moe", *INPUTS)
    def before(x, w):
        return aten.linear.default(x, w)

    message = check.declines(RecognizeLinear(), before, untouched=False)
    assert "matched 1 of 11 sites in 'moe' (2 layers)" in message
