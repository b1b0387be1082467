import torch

from dsa_compile.facts.config import CompileConfig
from dsa_compile.facts.layout import Layout
from dsa_compile.passes.join_all_reduces import JoinAllReduces
from dsa_compile.passes.shard_mlps import ShardMlps
from tests.passes.conftest import PassCheck
from tests.passes.sketch import region, value, weight

aten, dsa = torch.ops.aten, torch.ops.dsa

TP2 = CompileConfig(layout=Layout(tp=2))


def operands(inner: int):
    shapes = {"gate": (inner, 24), "up": (inner, 24), "down": (24, inner)}
    weights = [weight(f"{name}{n}", *shape) for n in (1, 2) for name, shape in shapes.items()]
    return value("x", "T", 24), *weights


def mlp(x, gate, up, down):
    hidden = dsa.swiglu.default(dsa.linear.default(x, gate), dsa.linear.default(x, up))
    return dsa.linear.default(hidden, down)


@region("moe", *operands(32))
def two(x, *weights):
    return aten.add.Tensor(mlp(x, *weights[:3]), mlp(x, *weights[3:]))


def test_two_sums_are_added_before_they_travel(check: PassCheck) -> None:
    @region("moe", *operands(16))
    def after(x, *weights):
        total = aten.add.Tensor(mlp(x, *weights[:3]), mlp(x, *weights[3:]))
        return dsa.all_reduce.default(total, "tp", 2)

    check(JoinAllReduces(), two, after, prepare=[ShardMlps()], config=TP2)


def test_sums_over_other_ranks_stay_apart(check: PassCheck) -> None:
    @region("moe", value("x", "T", 24), value("y", "T", 24))
    def before(x, y):
        sums = dsa.all_reduce.default(x, "tp", 2), dsa.all_reduce.default(y, "dp", 2)
        return aten.add.Tensor(*sums)

    assert "matched 0 of 1" in check.declines(JoinAllReduces(), before, config=TP2)
