import torch

from dsa_compile.passes.recognize_layer_norm import RecognizeLayerNorm
from tests.passes.conftest import PassCheck
from tests.passes.sketch import region, value, weight

aten, dsa = torch.ops.aten, torch.ops.dsa

INPUTS = (value("x", "B", "S", 32), weight("norm.weight", 32), weight("norm.bias", 32))


def test_becomes_one_op(check: PassCheck) -> None:
    @region("dense", *INPUTS)
    def before(x, weight, bias):
        return aten.layer_norm.default(x, [32], weight, bias, 1e-6, False)

    @region("dense", *INPUTS)
    def expected(x, weight, bias):
        return dsa.layer_norm.default(x, weight, bias, 1e-6)

    check(RecognizeLayerNorm(), before, expected)


def test_declines_a_norm_without_bias(check: PassCheck) -> None:
    @region("dense", *INPUTS, path="k_norm")
    def before(x, weight, bias):
        return aten.layer_norm.default(x, [32], weight, None, 1e-6)

    message = check.declines(RecognizeLayerNorm(), before)
    assert message.endswith("k_norm: node layer_norm_default: 'bias' should be a node, found None")


def test_declines_a_norm_over_two_dimensions(check: PassCheck) -> None:
    two = (value("x", "B", 4, 8), weight("norm.weight", 4, 8), weight("norm.bias", 4, 8))

    @region("dense", *two, path="k_norm")
    def before(x, weight, bias):
        return aten.layer_norm.default(x, [4, 8], weight, bias, 1e-6)

    message = check.declines(RecognizeLayerNorm(), before)
    assert message.endswith("found [4, 8] where 1 items were expected")
