import torch

from dsa_compile.facts.config import CompileConfig
from dsa_compile.facts.layout import Layout
from dsa_compile.passes.shard_mlps import ShardMlps
from dsa_compile.weights.plan import Load, Shard
from tests.passes.conftest import PassCheck
from tests.passes.sketch import fragment, region, value, weight

aten, dsa = torch.ops.aten, torch.ops.dsa

TP2 = CompileConfig(layout=Layout(tp=2))


def operands(inner: int):
    return (
        value("x", "T", 24),
        weight("gate", inner, 24),
        weight("up", inner, 24),
        weight("down", 24, inner),
    )


def mlp(x, gate, up, down):
    hidden = dsa.swiglu.default(dsa.linear.default(x, gate), dsa.linear.default(x, up))
    return dsa.linear.default(hidden, down)


@region("dense", *operands(32))
def before(*given):
    return mlp(*given)


def test_each_rank_has_a_part_of_the_inner_dimension(check: PassCheck) -> None:
    @region("dense", *operands(16))
    def after(*given):
        return dsa.all_reduce.default(mlp(*given), "tp", 2)

    check(ShardMlps(), before, after, config=TP2)


def test_the_plan_says_which_part_by_rank_and_not_which_rank() -> None:
    program = fragment(before, config=TP2)
    ShardMlps()(program)
    entries = program.weights.entries("dense")
    assert entries["gate"].expr == Shard("tp", 2, 0, 16, Load("{layer}.gate"))
    assert entries["down"].expr == Shard("tp", 2, 1, 16, Load("{layer}.down"))
    assert entries["down"].shape == (24, 16)


def test_a_hidden_value_that_is_used_elsewhere_is_not_cut(check: PassCheck) -> None:
    @region("dense", *operands(32), outputs=("logits", "gated"))
    def shared(x, gate, up, down):
        gated = dsa.linear.default(x, gate)
        hidden = dsa.swiglu.default(gated, dsa.linear.default(x, up))
        return dsa.linear.default(hidden, down), gated

    assert "extra user output" in check.declines(ShardMlps(), shared, config=TP2)
