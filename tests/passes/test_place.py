from types import SimpleNamespace

import pytest
import torch

from dsa_compile.facts.config import CompileConfig
from dsa_compile.facts.layout import Layout
from dsa_compile.ir.placement_check import placement_problems
from dsa_compile.ops import COMBINE
from dsa_compile.passes.place import PLACES, Place
from dsa_compile.weights.plan import Load, Shard
from dsa_compile.weights.ranks import entry_at_rank
from tests.passes.conftest import PassCheck
from tests.passes.sketch import batch, fragment, materialize, region, value, weight

aten, dsa = torch.ops.aten, torch.ops.dsa

TP2 = CompileConfig(layout=Layout(tp=2))
HEADS, NOPE, ROPE, RANK, LOW, WIDTH = 4, 16, 8, 32, 24, 64
EXPERTS, INNER, HIDDEN = 16, 16, 24  # as many experts as the tiny model has
NOTHING = SimpleNamespace(shape=None)  # a reader of which nothing is read


# Attention.
def attention(x, cache, slots, q_b, w_uk, w_uv, o_proj, heads=HEADS):
    q = aten.view.default(dsa.linear.default(x, q_b), [-1, heads, NOPE + ROPE])
    halves = aten.split_with_sizes.default(q, [NOPE, ROPE], -1)
    absorbed = dsa.absorb_query.default(halves[0], w_uk)
    out = dsa.paged_latent_attention.default(absorbed, halves[1], cache, slots, 0.25)
    flat = aten.reshape.default(dsa.expand_output.default(out, w_uv), [-1, heads * NOPE])
    return dsa.linear.default(flat, o_proj)


def of_heads(heads: int = HEADS):
    return (
        value("x", "T", LOW),
        value("cache", 2, 16, RANK + ROPE),
        value("slots", "T", 3, dtype=torch.int32),
        weight("q_b", heads * (NOPE + ROPE), LOW),
        weight("w_uk", heads, NOPE, RANK),
        weight("w_uv", heads, NOPE, RANK),
        weight("o_proj", WIDTH, heads * NOPE),
    )


SLOTS = {"slots": torch.arange(36, dtype=torch.int32).view(12, 3) % 32}


def test_each_rank_has_its_heads(check: PassCheck) -> None:
    @region("dense", *of_heads())
    def before(*given):
        return attention(*given)

    @region("dense", *of_heads(HEADS // 2))
    def after(*given):
        part = attention(*given, heads=HEADS // 2)
        return dsa.all_reduce.default(part, "tp", 2)

    check(Place(), before, after, inputs=SLOTS, config=TP2)


def test_heads_that_no_collective_brings_together_are_not_cut(check: PassCheck) -> None:
    @region("dense", *of_heads(), outputs=("logits", "q"))
    def before(x, cache, slots, q_b, w_uk, w_uv, o_proj):
        q = aten.view.default(dsa.linear.default(x, q_b), [-1, HEADS, NOPE + ROPE])
        halves = aten.split_with_sizes.default(q, [NOPE, ROPE], -1)
        absorbed = dsa.absorb_query.default(halves[0], w_uk)
        out = dsa.paged_latent_attention.default(absorbed, halves[1], cache, slots, 0.25)
        flat = aten.reshape.default(dsa.expand_output.default(out, w_uv), [-1, HEADS * NOPE])
        return dsa.linear.default(flat, o_proj), aten.mul.Tensor(halves[1], 2.0)

    message = check.declines(Place(), before, config=TP2)
    assert "is returned as q and is a rank's part along dimension -2" in message


def test_queries_that_no_weight_makes_are_not_cut(check: PassCheck) -> None:
    @region("dense", value("q", "T", HEADS, NOPE), weight("w_uk", HEADS, NOPE, RANK))
    def before(q, w_uk):
        return dsa.absorb_query.default(q, w_uk)

    message = check.declines(Place(), before, config=TP2)
    assert "node q: is to be a rank's part along dimension -2, and no weight makes it" in message


# MLPs.
def mlp(x, gate, up, down):
    hidden = dsa.swiglu.default(dsa.linear.default(x, gate), dsa.linear.default(x, up))
    return dsa.linear.default(hidden, down)


def of_mlps(inner: int, count: int = 1):
    shapes = {"gate": (inner, HIDDEN), "up": (inner, HIDDEN), "down": (HIDDEN, inner)}
    every = [weight(f"{name}{n}", *s) for n in range(count) for name, s in shapes.items()]
    return value("x", "T", HIDDEN), *every


@region("dense", *of_mlps(32))
def one_mlp(*given):
    return mlp(*given)


def test_each_rank_has_a_part_of_the_inner_dimension(check: PassCheck) -> None:
    @region("dense", *of_mlps(16))
    def after(*given):
        return dsa.all_reduce.default(mlp(*given), "tp", 2)

    check(Place(), one_mlp, after, config=TP2)


def test_the_plan_says_which_part_by_rank_and_not_which_rank() -> None:
    program = fragment(one_mlp, config=TP2)
    Place()(program)
    entries = program.weights.entries("dense")
    assert entries["gate0"].expr == Shard("tp", 2, 0, 16, Load("{layer}.gate0"))
    assert entries["down0"].expr == Shard("tp", 2, 1, 16, Load("{layer}.down0"))
    assert entries["down0"].shape == (HIDDEN, 16)


def test_a_part_that_something_else_takes_is_gathered_for_it(check: PassCheck) -> None:
    @region("dense", *of_mlps(32), outputs=("logits", "gated"))
    def before(x, gate, up, down):
        gated = dsa.linear.default(x, gate)
        hidden = dsa.swiglu.default(gated, dsa.linear.default(x, up))
        return dsa.linear.default(hidden, down), gated

    @region("dense", *of_mlps(16), outputs=("logits", "gated"))
    def after(x, gate, up, down):
        gated = dsa.linear.default(x, gate)
        hidden = dsa.swiglu.default(gated, dsa.linear.default(x, up))
        total = dsa.all_reduce.default(dsa.linear.default(hidden, down), "tp", 2)
        return total, dsa.all_gather.default(gated, "tp", 2)

    check(Place(), before, after, config=TP2)


def test_two_sums_are_added_before_they_travel(check: PassCheck) -> None:
    @region("moe", *of_mlps(32, 2))
    def before(x, *weights):
        return aten.add.Tensor(mlp(x, *weights[:3]), mlp(x, *weights[3:]))

    @region("moe", *of_mlps(16, 2))
    def after(x, *weights):
        total = aten.add.Tensor(mlp(x, *weights[:3]), mlp(x, *weights[3:]))
        return dsa.all_reduce.default(total, "tp", 2)

    check(Place(), before, after, config=TP2)


def test_a_sum_joins_the_residual_when_it_is_whole(check: PassCheck) -> None:
    @region("dense", *of_mlps(32))
    def before(x, *weights):
        return aten.add.Tensor(x, mlp(x, *weights))

    @region("dense", *of_mlps(16))
    def after(x, *weights):
        return aten.add.Tensor(x, dsa.all_reduce.default(mlp(x, *weights), "tp", 2))

    check(Place(), before, after, config=TP2)


# Experts.
def of_experts(experts: int = EXPERTS, inner: int = INNER, places: bool = False):
    return (
        value("x", "T", HIDDEN),
        value("w", "T", 3),
        value("i", "T", 3, dtype=torch.int64),
        weight("gate_up", experts, 2 * inner, HIDDEN),
        weight("down", experts, HIDDEN, inner),
        *([weight(PLACES, EXPERTS, dtype=torch.int64)] if places else []),
    )


@region("moe", *of_experts())
def experts(*given):
    return dsa.experts.default(*given)


CHOICES = {"i": torch.randint(0, EXPERTS, (12, 3), generator=torch.Generator().manual_seed(3))}


def test_each_rank_has_a_part_of_every_expert(check: PassCheck) -> None:
    @region("moe", *of_experts(inner=INNER // 2))
    def after(*given):
        return dsa.all_reduce.default(dsa.experts.default(*given), "tp", 2)

    check(Place(), experts, after, inputs=CHOICES, config=TP2)


@pytest.mark.parametrize("ranks", [2, 4])
def test_each_rank_has_whole_experts(check: PassCheck, ranks: int) -> None:
    @region("moe", *of_experts(EXPERTS // ranks, places=True))
    def after(x, w, i, gate_up, down, places):
        own = dsa.place_experts.default(i, places)
        return dsa.all_reduce.default(dsa.experts.default(x, w, own, gate_up, down), "tp", ranks)

    config = CompileConfig(layout=Layout(tp=ranks, ep=ranks))
    check(Place(), experts, after, inputs=CHOICES, config=config)


@pytest.mark.parametrize("whole", [True, False])
def test_experts_take_the_tokens_of_all_lanes(check: PassCheck, whole: bool) -> None:
    sizes = (EXPERTS // 2, INNER) if whole else (EXPERTS, INNER // 2)

    @region("moe", *of_experts(*sizes, places=whole))
    def after(x, w, i, gate_up, down, *places):
        rows = dsa.all_gather_many.default([x, w, i], "dp", 2)
        x, w, i = rows[0], rows[1], rows[2]
        if places:
            i = dsa.place_experts.default(i, *places)
        return dsa.reduce_scatter.default(dsa.experts.default(x, w, i, gate_up, down), "dp", 2)

    config = CompileConfig(layout=Layout(dp=2, ep=2 if whole else 1))
    check(Place(), experts, after, inputs=CHOICES, config=config)


def test_a_lane_of_several_ranks_sums_over_them_in_the_end() -> None:
    program = fragment(experts, config=CompileConfig(layout=Layout(tp=2, dp=2, ep=4)))
    Place()(program)
    found = [
        (node.target, node.args[1:3])
        for node in program.regions["moe"].graph.nodes
        if node.target in COMBINE
    ]
    assert found == [
        (dsa.all_gather_many.default, ("dp", 2)),
        (dsa.reduce_scatter.default, ("dp", 2)),
        (dsa.all_reduce.default, ("tp", 2)),
    ]
    assert list(placement_problems(program)) == []


def test_every_expert_has_one_place() -> None:
    program = fragment(experts, config=CompileConfig(layout=Layout(tp=8, ep=8)))
    Place()(program)
    entry = program.weights.entries("moe")[PLACES]
    found = [materialize(entry_at_rank(entry, {"tp": rank}), {}, NOTHING) for rank in range(8)]
    assert found[2].tolist() == [*[-1] * 4, 0, 1, *[-1] * 10]
    assert (torch.stack(found) >= 0).sum(0).tolist() == [1] * EXPERTS


# Vocabulary and embedding.
def test_each_rank_has_a_part_of_the_vocabulary(check: PassCheck) -> None:
    @region("head", value("x", "T", HIDDEN), weight("lm_head.weight", 40, HIDDEN))
    def before(x, table):
        return dsa.linear.default(x, table)

    @region("head", value("x", "T", HIDDEN), weight("lm_head.weight", 10, HIDDEN))
    def after(x, table):
        return dsa.all_gather.default(dsa.linear.default(x, table), "tp", 4)

    check(Place(), before, after, config=CompileConfig(layout=Layout(tp=4)))


IDS = {"input_ids": torch.arange(12) * 3}


def of_table(width: int):
    return batch("input_ids", "T"), weight("embed_tokens.weight", 40, width)


@region("embed", *of_table(HIDDEN), outputs=("hidden",))
def embedded(ids, table):
    return dsa.embedding.default(ids, table)


def test_each_rank_has_some_columns_of_the_embedding(check: PassCheck) -> None:
    @region("embed", *of_table(HIDDEN // 2), outputs=("hidden",))
    def after(ids, table):
        return dsa.all_gather.default(dsa.embedding.default(ids, table), "tp", 2)

    layout = Layout(tp=2, shard_embedding=True)
    check(Place(), embedded, after, inputs=IDS, config=CompileConfig(layout=layout))


def test_the_embedding_is_whole_unless_the_layout_says_so() -> None:
    program = fragment(embedded, config=TP2)
    assert Place()(program).rewrites == 0


@pytest.mark.parametrize("tp", [3, 5])
def test_it_runs_where_there_are_several_ranks(tp: int) -> None:
    assert not Place().runs(CompileConfig())
    assert Place().runs(CompileConfig(layout=Layout(tp=tp)))
