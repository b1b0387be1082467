from types import SimpleNamespace

import pytest
import torch

from dsa_compile.facts.config import CompileConfig
from dsa_compile.facts.layout import Layout
from dsa_compile.ir.rank_check import rank_problems
from dsa_compile.ops import COMBINE
from dsa_compile.passes.shard_experts import PLACES, ShardExperts
from dsa_compile.weights.ranks import entry_at_rank
from tests.passes.conftest import PassCheck
from tests.passes.sketch import fragment, materialize, region, value, weight

dsa = torch.ops.dsa

EXPERTS, INNER, HIDDEN = 8, 16, 24


def operands(experts: int = EXPERTS, inner: int = INNER, places: bool = False):
    return (
        value("x", "T", HIDDEN),
        value("w", "T", 3),
        value("i", "T", 3, dtype=torch.int64),
        weight("gate_up", experts, 2 * inner, HIDDEN),
        weight("down", experts, HIDDEN, inner),
        *([weight(PLACES, EXPERTS, dtype=torch.int64)] if places else []),
    )


@region("moe", *operands())
def before(*given):
    return dsa.experts.default(*given)


NOTHING = SimpleNamespace(shape=None)  # a reader of which nothing is read
GIVEN = {"i": torch.randint(0, EXPERTS, (12, 3), generator=torch.Generator().manual_seed(3))}


def test_each_rank_has_a_part_of_every_expert(check: PassCheck) -> None:
    @region("moe", *operands(inner=INNER // 2))
    def after(*given):
        return dsa.all_reduce.default(dsa.experts.default(*given), "tp", 2)

    config = CompileConfig(layout=Layout(tp=2))
    check(ShardExperts(), before, after, inputs=GIVEN, config=config)


@pytest.mark.parametrize("ranks", [2, 4])
def test_each_rank_has_whole_experts(check: PassCheck, ranks: int) -> None:
    @region("moe", *operands(EXPERTS // ranks, places=True))
    def after(x, w, i, gate_up, down, places):
        own = dsa.place_experts.default(i, places)
        return dsa.all_reduce.default(dsa.experts.default(x, w, own, gate_up, down), "tp", ranks)

    config = CompileConfig(layout=Layout(tp=ranks, ep=ranks))
    check(ShardExperts(), before, after, inputs=GIVEN, config=config)


@pytest.mark.parametrize("whole", [True, False])
def test_experts_take_the_tokens_of_all_lanes(check: PassCheck, whole: bool) -> None:
    sizes = (EXPERTS // 2, INNER) if whole else (EXPERTS, INNER // 2)

    @region("moe", *operands(*sizes, places=whole))
    def after(x, w, i, gate_up, down, *places):
        x, w, i = (dsa.all_gather_rows.default(each, "dp", 2) for each in (x, w, i))
        if places:
            i = dsa.place_experts.default(i, *places)
        return dsa.reduce_scatter.default(dsa.experts.default(x, w, i, gate_up, down), "dp", 2)

    config = CompileConfig(layout=Layout(dp=2, ep=2 if whole else 1))
    check(ShardExperts(), before, after, inputs=GIVEN, config=config)


def test_a_lane_of_several_ranks_sums_over_them_in_the_end() -> None:
    program = fragment(before, config=CompileConfig(layout=Layout(tp=2, dp=2, ep=4)))
    ShardExperts()(program)
    found = [
        (node.target, node.args[1:3])
        for node in program.regions["moe"].graph.nodes
        if node.target in COMBINE
    ]
    gathers = [(dsa.all_gather_rows.default, ("dp", 2))] * 3
    assert found == [
        *gathers, (dsa.reduce_scatter.default, ("dp", 2)), (dsa.all_reduce.default, ("tp", 2))
    ]  # fmt: skip
    assert list(rank_problems(program)) == []


def test_every_expert_has_one_place() -> None:
    program = fragment(before, config=CompileConfig(layout=Layout(tp=4, ep=4)))
    ShardExperts()(program)
    entry = program.weights.entries("moe")[PLACES]
    found = [materialize(entry_at_rank(entry, {"tp": rank}), {}, NOTHING) for rank in range(4)]
    assert found[2].tolist() == [-1, -1, -1, -1, 0, 1, -1, -1]
    assert (torch.stack(found) >= 0).sum(0).tolist() == [1] * EXPERTS
