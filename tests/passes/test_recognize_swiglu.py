import torch

from dsa_compile.passes.recognize_swiglu import RecognizeSwiglu
from tests.passes.conftest import PassCheck
from tests.passes.sketch import region, value

aten, dsa = torch.ops.aten, torch.ops.dsa

INPUTS = (value("gate", "B", "S", 24), value("up", "B", "S", 24))


@region("dense", *INPUTS)
def expected(gate, up):
    return dsa.swiglu.default(gate, up)


def test_becomes_one_op(check: PassCheck) -> None:
    @region("dense", *INPUTS)
    def before(gate, up):
        return aten.mul.Tensor(aten.silu.default(gate), up)

    check(RecognizeSwiglu(), before, expected)


def test_either_order(check: PassCheck) -> None:
    @region("dense", *INPUTS)
    def before(gate, up):
        return aten.mul.Tensor(up, aten.silu.default(gate))

    check(RecognizeSwiglu(), before, expected)


def test_declines_an_activation_used_elsewhere(check: PassCheck) -> None:
    @region("dense", *INPUTS, outputs=("y", "z"), path="mlp")
    def before(gate, up):
        act = aten.silu.default(gate)
        return aten.mul.Tensor(act, up), aten.neg.default(act)

    message = check.declines(RecognizeSwiglu(), before)
    assert message.endswith("mlp: node silu_default: extra user neg_default outside the match")


def test_declines_another_activation(check: PassCheck) -> None:
    @region("dense", *INPUTS, path="mlp")
    def before(gate, up):
        return aten.mul.Tensor(aten.relu.default(gate), up)

    message = check.declines(RecognizeSwiglu(), before)
    assert "calls aten.relu.default where aten.silu.default was expected" in message
