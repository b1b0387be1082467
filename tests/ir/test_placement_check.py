"""Programs that are wrong on several ranks, found without running them, at the node that is."""

from collections.abc import Callable

import pytest
import torch
from torch import fx

from dsa_compile.facts.config import CompileConfig
from dsa_compile.facts.layout import Layout
from dsa_compile.ir.placement_check import placement_problems
from dsa_compile.ir.program import Program
from dsa_compile.passes import place
from dsa_compile.weights.plan import Concat, Shard, WeightEntry
from tests.passes.sketch import Fragment, Sketch, cache, fragment, region, value, weight

aten, dsa = torch.ops.aten, torch.ops.dsa

TP2 = CompileConfig(layout=Layout(tp=2))
EP2 = CompileConfig(layout=Layout(tp=2, ep=2))


def on_two(sketch: Sketch, **cuts: int) -> Fragment:
    """A program of local sizes whose weights are parts along these dimensions."""
    program = fragment(sketch, config=TP2)
    for key, dim in cuts.items():
        entry = program.weights.remove(sketch.name, key)
        expr = Shard("tp", 2, dim, entry.shape[dim], entry.expr)
        program.weights.define(sketch.name, key, WeightEntry(entry.dtype, entry.shape, expr))
    return program


def only(program: Program) -> str:
    (problem,) = placement_problems(program)
    assert "\n" not in problem
    return problem


MLP = (
    value("h", "T", 24),
    value("x", "T", 24),
    weight("gate", 16, 24),
    weight("up", 16, 24),
    weight("down", 24, 16),
)
CUTS = {"gate": 0, "up": 0, "down": 1}


def mlp(x, gate, up, down):
    hidden = dsa.swiglu.default(dsa.linear.default(x, gate), dsa.linear.default(x, up))
    return dsa.linear.default(hidden, down)


@region("dense", *MLP)
def sound(h, x, *weights):
    return aten.add.Tensor(h, dsa.all_reduce.default(mlp(x, *weights), "tp", 2))


def test_a_sound_program_has_no_problem() -> None:
    assert list(placement_problems(on_two(sound, **CUTS))) == []


@region("dense", *MLP)
def unreduced(h, x, *weights):
    return aten.add.Tensor(h, mlp(x, *weights))


@region("dense", *MLP)
def reduced_after_the_residual(h, x, *weights):
    return dsa.all_reduce.default(aten.add.Tensor(h, mlp(x, *weights)), "tp", 2)


@region("dense", *MLP)
def reduced_twice(h, x, *weights):
    total = dsa.all_reduce.default(mlp(x, *weights), "tp", 2)
    return aten.add.Tensor(h, dsa.all_reduce.default(total, "tp", 2))


@region("dense", *MLP)
def returned_unreduced(h, x, *weights):
    return mlp(x, *weights)


@region("dense", *MLP)
def normed_before_the_sum(h, x, gate, up, down):
    return dsa.rms_norm.default(mlp(x, gate, up, down), aten.select.int(x, 0, 0), 1e-6)


@region("dense", *MLP)
def a_part_is_returned(h, x, gate, up, down):
    return dsa.linear.default(x, gate)


@region("dense", *MLP)
def a_part_is_reduced(h, x, gate, up, down):
    return dsa.all_reduce.default(dsa.linear.default(x, gate), "tp", 2)


@region("dense", *MLP)
def a_sum_is_gathered(h, x, *weights):
    return dsa.all_gather.default(mlp(x, *weights), "tp", 2)


@region("dense", *MLP)
def squared(h, x, *weights):
    part = mlp(x, *weights)
    return dsa.all_reduce.default(aten.mul.Tensor(part, part), "tp", 2)


@pytest.mark.parametrize(
    ("sketch", "cuts", "found"),
    [
        (unreduced, CUTS, "node add_tensor takes linear_default_2 as a value beside h (alike"),
        (reduced_after_the_residual, CUTS, "node add_tensor takes linear_default_2 as a value"),
        (reduced_twice, CUTS, "node all_reduce_default_1 takes all_reduce_default, which is alike"),
        (returned_unreduced, CUTS, "linear_default_2 is returned as logits and is a partial sum"),
        (normed_before_the_sum, CUTS, "rms_norm_default takes linear_default_2 as a value"),
        (a_part_is_returned, CUTS, "a rank's part along dimension -1: an all-gather is missing"),
        (
            a_part_is_reduced,
            CUTS,
            "all_reduce_default takes linear_default, which is a rank's",
        ),
        (
            a_sum_is_gathered,
            CUTS,
            "all_gather_default takes linear_default_2, which is a part",
        ),
        (squared, CUTS, "node mul_tensor takes linear_default_2 as a value"),
        # each of the three weights left whole, or cut along the other dimension
        (sound, {"up": 0, "down": 1}, "node swiglu_default takes gate linear_default"),
        (sound, {"gate": 0, "up": 0}, "node linear_default_2 takes weight down"),
        (sound, {"gate": 0, "up": 0, "down": 0}, "node linear_default_2 takes weight down"),
        (sound, {"gate": 1, "up": 0, "down": 1}, "node linear_default takes x x"),
        (sound, {}, "node all_reduce_default takes linear_default_2, which is alike on all ranks"),
    ],
)
def test_a_wrong_mlp_is_found_at_its_node(sketch: Sketch, cuts, found: str) -> None:
    assert found in only(on_two(sketch, **cuts))


def test_a_sharded_indexer_is_found_where_it_selects() -> None:
    @region(
        "dense",
        value("x", "T", 24),
        weight("wq_b", 2 * 8, 24),
        weight("weights_proj", 2, 24),
        cache("index_cache", 2, 16, 8),
        value("tables", "R", "M", dtype=torch.int32),
        value("starts", "R+1", dtype=torch.int32),
        value("lengths", "R", dtype=torch.int32),
        outputs=("selected",),
    )
    def sketch(x, wq_b, weights_proj, index_cache, tables, starts, lengths):
        q = aten.view.default(dsa.linear.default(x, wq_b), [-1, 2, 8])
        w = dsa.linear.default(x, weights_proj)
        return dsa.paged_index_topk.default(q, w, index_cache, tables, starts, lengths, 4, 1.0)

    problem = only(on_two(sketch, wq_b=0, weights_proj=0))
    assert "node paged_index_topk_default computes over" in problem
    assert "it is no sum" in problem


def test_a_cut_router_is_found() -> None:
    @region("moe", value("x", "T", 24), weight("gate", 8, 24), weight("bias", 8))
    def sketch(x, gate, bias):
        return dsa.router.default(x, gate, bias, 1, 1, 2, True, 1.0)[0]

    assert "node router_default computes over E of" in only(on_two(sketch, gate=0, bias=0))


def test_a_cache_that_would_differ_between_ranks_is_found() -> None:
    @region(
        "dense",
        value("x", "T", 24),
        weight("kv", 8, 24),
        value("pe", "T", 8),
        cache("latent_cache", 2, 16, 16),
        value("slots", "T", dtype=torch.int64),
        outputs=("logits",),
    )
    def sketch(x, kv, pe, latent_cache, slots):
        dsa.write_latent_cache.default(dsa.linear.default(x, kv), pe, latent_cache, slots)
        return aten.mul.Tensor(x, 2.0)

    assert "node write_latent_cache_default takes" in only(on_two(sketch, kv=0))


EXPERTS = (
    value("x", "T", 24),
    value("w", "T", 3),
    value("i", "T", 3, dtype=torch.int64),
    weight("gate_up", 8, 32, 24),
    weight("down", 8, 24, 16),
)


@region("moe", *EXPERTS)
def experts(*operands):
    return dsa.experts.default(*operands)


def left_out(op, monkeypatch) -> None:
    """The pass that places a model makes no calls of an op."""
    convert = place.convert

    def forget(edit, program: Program, value: fx.Node, target, *given) -> fx.Node:
        return value if target is op else convert(edit, program, value, target, *given)

    monkeypatch.setattr(place, "convert", forget)


def test_experts_by_rank_need_the_numbers_that_they_have_there(monkeypatch) -> None:
    left_out(dsa.place_experts.default, monkeypatch)
    program = fragment(experts, config=EP2)
    place.Place()(program)
    problem = only(program)
    assert "takes experts of its rank by numbers among all of them" in problem
    assert "made by place site 1" in problem


def test_the_pass_that_left_a_partial_sum_is_named(monkeypatch) -> None:
    left_out(dsa.all_reduce.default, monkeypatch)

    @region("dense", *(i for i in MLP[1:]))
    def whole(x, *weights):
        return mlp(x, *weights)

    program = fragment(whole, config=TP2)
    place.Place()(program)
    assert only(program).endswith("an all-reduce is missing, made by place site 1")


def test_a_weight_of_parts_and_wholes_is_found() -> None:
    program = on_two(sound, **CUTS)
    entry = program.weights.remove("dense", "gate")
    assert isinstance(entry.expr, Shard)
    mixed = Concat(0, (entry.expr, entry.expr.of))
    program.weights.define("dense", "gate", WeightEntry(entry.dtype, entry.shape, mixed))
    assert "node gate joins parts" in only(program)


@pytest.mark.parametrize("order", [("tp", "dp"), ("dp",)])
def test_variants_that_meet_in_another_order_are_found(order: tuple[str, ...]) -> None:
    def variant(name: str, axes: tuple[str, ...]) -> Callable[..., Sketch]:
        @region(name, *MLP)
        def sketch(h, x, *weights):
            total = mlp(x, *weights)
            for axis in axes:
                total = dsa.all_reduce.default(total, axis, 2)
            return total

        return sketch

    program = on_two(variant("dense", ("tp",)), **CUTS)
    other = fragment(variant("dense", order), config=TP2).regions["dense"].copy("dense.short")
    program.regions["dense.short"] = other
    problems = list(placement_problems(program))
    assert "would wait for ever" in problems[-1]


def on_lanes(sketch: Sketch) -> Fragment:
    """Two lanes, of which each has half of every expert."""
    program = fragment(sketch, config=CompileConfig(layout=Layout(dp=2)))
    for key, dim, stacked in (("gate_up", 1, 2), ("down", 2, 1)):
        entry = program.weights.remove(sketch.name, key)
        length = entry.shape[dim] // stacked
        expr = Shard("dp", 2, dim, length, entry.expr, stacked)
        program.weights.define(sketch.name, key, WeightEntry(entry.dtype, entry.shape, expr))
    return program


def all_rows(*values):
    return [dsa.all_gather_many.default([each], "dp", 2)[0] for each in values]


@region("moe", *EXPERTS)
def of_all_lanes(x, w, i, gate_up, down):
    total = dsa.experts.default(*all_rows(x, w, i), gate_up, down)
    return aten.add.Tensor(x, dsa.reduce_scatter.default(total, "dp", 2))


@region("moe", *EXPERTS)
def of_all_lanes_together(x, w, i, gate_up, down):
    rows = dsa.all_gather_many.default([x, w, i], "dp", 2)
    total = dsa.experts.default(rows[0], rows[1], rows[2], gate_up, down)
    return aten.add.Tensor(x, dsa.reduce_scatter.default(total, "dp", 2))


@region("moe", *EXPERTS)
def gathered_beside_others(x, w, i, gate_up, down):
    return dsa.all_gather_many.default([w, *all_rows(x)], "dp", 2)[0]


@region("moe", *EXPERTS)
def of_one_lane(x, w, i, gate_up, down):
    return dsa.experts.default(x, w, i, gate_up, down)


@region("moe", *EXPERTS)
def left_with_all(x, w, i, gate_up, down):
    return dsa.experts.default(*all_rows(x, w, i), gate_up, down)


@region("moe", *EXPERTS)
def no_sum(x, w, i, gate_up, down):
    return dsa.reduce_scatter.default(*all_rows(x), "dp", 2)


@region("moe", *EXPERTS)
def gathered_twice(x, w, i, gate_up, down):
    return all_rows(*all_rows(x))[0]


@pytest.mark.parametrize(
    ("sketch", "found"),
    [
        (of_one_lane, "experts_default takes x, w, i as a value beside gate_up"),
        (left_with_all, "is a partial sum of its rank: a reduce-scatter is missing"),
        (no_sum, "takes getitem, which is alike on all ranks, and not a partial"),
        (gathered_beside_others, "which is alike on all ranks, and not its lane's own"),
        (gathered_twice, "which is alike on all ranks, and not its lane's own"),
    ],
)
def test_what_lanes_do_not_exchange_is_found(sketch: Sketch, found: str) -> None:
    for right in (of_all_lanes, of_all_lanes_together):
        assert list(placement_problems(on_lanes(right))) == []
    assert found in only(on_lanes(sketch))


def test_variants_that_exchange_other_types_are_found() -> None:
    @region("moe", value("x", "T", 24), value("y", "T", 8))
    def wide(x, y):
        return dsa.reduce_scatter.default(*all_rows(x), "dp", 2)

    @region("moe", value("x", "T", 24), value("y", "T", 8))
    def narrow(x, y):
        return dsa.reduce_scatter.default(*all_rows(y), "dp", 2)

    config = CompileConfig(layout=Layout(dp=2))
    program = fragment(wide, config=config)
    program.regions["moe.short"] = fragment(narrow, config=config).regions["moe"].copy("moe.short")
    problems = list(placement_problems(program))
    assert "all_gather_many.default(float32[T, 8], dp, 2)" in problems[-1]
    assert "would wait for ever" in problems[-1]
