import torch

from dsa_compile.passes.pack_swiglu import PackSwiglu
from tests.passes.conftest import PassCheck
from tests.passes.sketch import region, value

aten, dsa = torch.ops.aten, torch.ops.dsa

X = value("gate_up", "T", 48)


def halves(x, sizes=(24, 24)):
    return aten.split_with_sizes.default(x, list(sizes), -1)


def test_split_and_gate_become_one_op(check: PassCheck) -> None:
    @region("dense", X)
    def before(gate_up):
        pair = halves(gate_up)
        return dsa.swiglu.default(pair[0], pair[1])

    @region("dense", X)
    def expected(gate_up):
        return dsa.swiglu_packed.default(gate_up)

    check(PackSwiglu(), before, expected)


def test_declines_swapped_halves(check: PassCheck) -> None:
    @region("dense", X, path="mlp")
    def before(gate_up):
        pair = halves(gate_up)
        return dsa.swiglu.default(pair[1], pair[0])

    assert check.declines(PackSwiglu(), before) == (
        "pass pack_swiglu: matched 0 of 1 sites in 'dense' (2 layers); nearest miss: "
        "mlp: node getitem: found 1 where 0 was expected"
    )


def test_declines_a_half_used_elsewhere(check: PassCheck) -> None:
    @region("dense", X, outputs=("y", "z"), path="mlp")
    def before(gate_up):
        pair = halves(gate_up)
        gate = pair[0]
        return dsa.swiglu.default(gate, pair[1]), aten.neg.default(gate)

    message = check.declines(PackSwiglu(), before)
    assert message.endswith("mlp: node getitem: extra user neg_default outside the match")


def test_declines_a_piece_between_the_halves(check: PassCheck) -> None:
    @region("dense", X, path="mlp")
    def before(gate_up):
        pieces = halves(gate_up, (20, 8, 20))
        return dsa.swiglu.default(pieces[0], pieces[2])

    check.declines(PackSwiglu(), before)
