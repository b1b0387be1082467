"""Faults of passes that cut a model over ranks.

Those whose values meet wrongly no compilation lets pass; its refusal must name the pass.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from dsa_compile.facts.placements import Split, WeightRow
from dsa_compile.weights.plan import Concat, Expr, Narrow, Reshape, Shard, Transpose
from tests.planted_bugs.changes import (
    altered,
    negated,
    node_of,
    planned,
    replanned,
    scaled,
    swapped,
)
from tests.planted_bugs.faults import Fault
from tests.planted_bugs.planting import (
    Plant,
    Planting,
    afterwards,
    both,
    here,
    inserting,
    result,
    wrap,
)

aten, dsa = torch.ops.aten, torch.ops.dsa
TENSOR = "fp8-kv-tensor"
TP2, DP2 = (("tp", 2),), (("dp", 2),)
CUT2 = (*TP2, ("shard_embedding", True))
EP2 = (*CUT2, ("ep", 2))
TP2_EP2, TP2_DP2, DP2_EP2 = (*TP2, ("ep", 2)), (*TP2, *DP2), (*DP2, ("ep", 2))
ALL4 = (*TP2, *DP2, ("ep", 4))


# Cuts of weights.
def of_the_other_rank(cut: Shard) -> Expr:
    """The halves exchanged."""
    first, second = (Narrow(cut.dim, at, cut.length, cut.of) for at in (0, cut.length))
    return replace(cut, of=Concat(cut.dim, (second, first)))


def of_the_first_rank(cut: Shard) -> Expr:
    """The first part on every rank."""
    first = Narrow(cut.dim, 0, cut.length, cut.of)
    return replace(cut, of=Concat(cut.dim, (first, first)))


def every_other(cut: Shard) -> Expr:
    """Even entries on one rank and odd ones on the other."""
    count = cut.ranks * cut.length
    order = (*range(0, count, 2), *range(1, count, 2))
    return replace(cut, of=Concat(cut.dim, tuple(Narrow(cut.dim, i, 1, cut.of) for i in order)))


def in_one_piece(cut: Shard) -> Expr:
    """Gate and up as if they were one matrix."""
    return replace(cut, stacked=1, length=cut.length * cut.stacked)


def by_rows(cut: Shard) -> Expr:
    """A square matrix cut along its other dimension, and turned to fit."""
    return Transpose(0, 1, Shard(cut.axis, cut.ranks, 1 - cut.dim, cut.length, cut.of))


def merged_then_cut(expr: Concat) -> Expr:
    """Gate and up, one upon the other, cut as one matrix."""
    cuts = [part for part in expr.parts if isinstance(part, Shard)]
    whole = Concat(0, tuple(cut.of for cut in cuts))
    return replace(cuts[0], of=whole, length=sum(cut.length for cut in cuts))


def shared_of_first_rank(expr: Concat) -> Expr:
    """The shared expert's part of one rank on each of them."""
    routed, shared = expr.parts
    assert isinstance(shared, Reshape)
    assert isinstance(shared.of, Shard)
    return replace(expr, parts=(routed, replace(shared, of=of_the_first_rank(shared.of))))


def of_first_part(expr: Any, change: Callable[[Shard], Expr]) -> Expr:
    if isinstance(expr, Concat):
        return replace(expr, parts=(of_first_part(expr.parts[0], change), *expr.parts[1:]))
    return change(expr)


def cut(key: str, change: Callable[[Shard], Expr], kind: str = "") -> Plant:
    """A weight is cut in another way, in regions of a kind or in all."""

    def plant(planting: Planting) -> None:
        def keep(whole: Any, edit: Any, program: Any, weight: Any, cut: Any) -> None:
            whole(edit, program, weight, cut)
            name = weight.meta["key"]
            if name.endswith(key) and edit.region.kind.startswith(kind):
                planned(program.weights, edit.region.kind, name, change)  # type: ignore[arg-type]
                planting.sites.add(edit._notes.number)

        planting.wrap("passes.place.keep_part", keep)

    return plant


def scales(place: str, kind: str, key: str, change: Callable[[Shard], Expr]) -> Plant:
    """Scales of a quantised weight are cut in another way."""
    return afterwards(place, replanned(kind, key, lambda expr: of_first_part(expr, change)))


def cutting(op: str, **pieces: int) -> Plant:
    """Rows of the table for operands of an op say other numbers of pieces."""

    def rows(found: Any, *_: Any) -> Iterator[Any]:
        for row in found:
            if row.op == op:
                row = replace(row, placement=replace(row.placement, pieces=pieces[row.operand]))
            yield row

    return result("facts.placements.weight_rows", rows)


def placed(rule: Callable[[int, int, int], int], ranks: int = 2) -> Plant:
    """Numbers of experts on a rank are ``rule(expert, rank, experts a rank)``."""

    def constant(whole: Any, dtype: str, shape: Any, values: tuple[int, ...]) -> Any:
        count = len(values) // ranks
        every = (rule(e, r, count // ranks) for r in range(ranks) for e in range(count))
        return whole(dtype, shape, tuple(every))

    return struck(here("passes.place.Constant", constant))


def struck(plant: Plant) -> Plant:
    """It is the sites that number experts."""

    def and_noted(planting: Planting) -> None:
        def define(whole: Any, edit: Any, program: Any) -> Any:
            planting.sites.add(edit._notes.number)
            return whole(edit, program)

        planting.wrap("passes.place.define_places", define)
        plant(planting)

    return and_noted


def matrices_dealt(whole: Any, edit: Any, program: Any, weight: Any, cut: Any) -> None:
    """Of whole experts a rank has every other one."""
    axis, split = cut
    if split.dim == -3 and weight.meta["key"].startswith("mlp.experts."):
        cut = axis, Split(-3, weight.meta["val"].shape[0] // 2)
    whole(edit, program, weight, cut)


def dealt(expert: int, rank: int, own: int) -> int:
    return expert // 2 if expert % 2 == rank else -1


def expert_first(whole: Any, dtype: str, shape: Any, values: tuple[int, ...]) -> Any:
    count = len(values) // 2
    return whole(dtype, shape, tuple(values[r * count + e] for e in range(count) for r in (0, 1)))


# Sums over ranks.
def summed(path: str, change: Callable[..., Any], kind: str = "") -> Plant:
    """``change(edit, part, root)`` is made of the parts at a path in place of an all-reduce."""

    def plant(planting: Planting) -> None:
        def convert(whole: Any, edit: Any, program: Any, part: Any, op: Any, *where: Any) -> Any:
            here = path in part.meta["path"] and edit.region.kind.startswith(kind)
            if op is not dsa.all_reduce.default or not here:
                return whole(edit, program, part, op, *where)
            planting.sites.add(edit._notes.number)
            return change(edit, part, where[-1])

        here("passes.place.convert", convert)(planting)

    return plant


def unreduced(edit: Any, part: Any, root: Any) -> Any:
    return part


def reduced_twice(edit: Any, part: Any, root: Any) -> Any:
    once = edit.call(dsa.all_reduce.default, part, "tp", 2, before=root)
    return edit.call(dsa.all_reduce.default, once, "tp", 2, before=root)


def residual_on_every_rank(edit: Any, part: Any, root: Any) -> Any:
    (add,) = (user for user in root.users if user.target is aten.add.Tensor)
    (residual,) = (node for node in add.all_input_nodes if node is not root)
    both = edit.call(aten.add.Tensor, residual, part, before=add)
    edit.swap(add, edit.call(dsa.all_reduce.default, both, "tp", 2, before=add))
    return part


def averaged(edit: Any, part: Any, root: Any) -> Any:
    half = edit.call(aten.mul.Tensor, part, 0.5, before=root)
    return edit.call(dsa.all_reduce.default, half, "tp", 2, before=root)


def of_sum(edit: Any, op: Any, args: Any) -> Any:
    """The second term is what all ranks already added."""
    total = edit.call(dsa.all_reduce.default, args[1], "tp", 2, before=args[1].next)
    return op, (args[0], total)


def doubled_scales(edit: Any, op: Any, args: Any) -> Any:
    """Scales that travel are twice as large."""
    (values, scale, *others), *where = args
    twice = edit.call(aten.mul.Tensor, scale, 2.0, before=node_of(edit, str(op)[:-8]))
    return op, ([values, twice, *others], *where)


def in_front_of_norm(own: Any) -> Any:
    return [x.args[0] if x.target is dsa.rms_norm.default else x for x in own]


def indexer_cut(found: Any, *_: Any) -> Iterator[Any]:
    """Each rank scores keys with its half of the index heads, and selects for itself."""
    yield from found
    yield WeightRow("paged_index_topk", "q", "tp", Split(-2), "indexer")
    yield WeightRow("paged_index_topk", "weights", "tp", Split(-1), "indexer")


def router_cut(edit: Any, program: Any, *rest: Any) -> bool:
    """Each rank has its half of the router's rows, twice."""
    if edit.region.kind != "moe":
        return False

    def half(expr: Expr) -> Expr:
        shard = Shard("tp", 2, 0, 8, expr)
        return Concat(0, (shard, shard))

    planned(program.weights, "moe", "mlp.gate.weight", half)
    return True


def found_by_type(whole: Any, edit: Any, old: Any, new: Any) -> None:
    """Of what is gathered at once the last of a type stands for all of that type."""
    if edit.pass_name == "gather_quantized":
        like = old.meta["val"]
        made = [user for user in new.args[0].users if user.meta["val"].dtype is like.dtype]
        alike = [user for user in made if user.meta["val"].shape[1] == like.shape[1]]
        new = max(alike, key=lambda user: user.args[1])
    whole(edit, old, new)


def without_the_sum(whole: Any, edit: Any, several: Any, index: int, old: Any, name: str) -> None:
    if edit.pass_name == "fuse_all_reduce_norm" and index == 3:
        return edit.swap(old, several.args[3])
    return whole(edit, several, index, old, name)


PLACE = "place"
OUTPUT, DOWN = "self_attn.o_proj.weight", "mlp.experts.down_proj_and_shared"
TWO = {"model": "two", "options": CUT2}
TWO_BF16 = {**TWO, "recipe": "bf16"}
BLOCKS = {"model": "blocks", "recipe": "fp8", "options": CUT2}
PASSES = (
    Fault("queries-of-the-other-rank", "queries of the other rank",
          cut("q_b_proj.weight", of_the_other_rank), PLACE, **TWO),
    Fault("every-other-heads-values", "every other head's values",
          cut("w_uv", every_other), PLACE, **TWO_BF16),
    Fault("halves-of-o-proj-exchanged", "the halves of o_proj are exchanged",
          cut("o_proj.weight", of_the_other_rank, "moe"), PLACE, **TWO_BF16),
    Fault("o-proj-cut-along-its-other-axis", "o_proj is cut along its other axis",
          cut("o_proj.weight", by_rows), PLACE, **TWO),
    Fault("no-all-reduce-behind-o-proj", "no all-reduce behind o_proj",
          summed("self_attn", unreduced, "moe"), PLACE, **TWO),
    Fault("o-proj-reduced-twice", "o_proj is reduced twice",
          summed("self_attn", reduced_twice), PLACE, **TWO),
    Fault("residual-on-every-rank", "the residual is added on every rank before the sum",
          summed("self_attn", residual_on_every_rank, "moe"), PLACE, **TWO),
    Fault("indexer-sharded", "each rank selects with its half of the index heads",
          result("facts.placements.weight_rows", indexer_cut), PLACE,
          **TWO),
    Fault("up-of-the-other-rank", "the up projection of the other rank",
          cut("up_proj.weight", of_the_other_rank, "dense"), PLACE, **TWO_BF16),
    Fault("shared-expert-reduced-twice", "what experts give is reduced twice",
          summed("mlp", reduced_twice, "moe"), PLACE, **TWO),
    Fault("down-of-the-first-rank", "the down projection of the first rank on every rank",
          cut("down_proj.weight", of_the_first_rank, "moe"), PLACE, **TWO),
    Fault("parts-averaged", "the parts of an MLP are averaged",
          summed("mlp", averaged, "dense"), PLACE, **TWO_BF16),
    Fault("gate-and-up-cut-as-one", "gate and up of experts are cut as one matrix",
          cut("experts.gate_up_proj", in_one_piece), PLACE, **TWO),
    Fault("experts-of-the-other-rank", "each rank numbers the experts that the other has",
          placed(lambda e, r, own: e - (1 - r) * own if e // own == 1 - r else -1), PLACE,
          model="two", options=EP2),
    Fault("an-expert-on-both-ranks", "an expert is on both ranks",
          placed(lambda e, r, own: 0 if r and not e else e - r * own if e // own == r else -1),
          PLACE, model="two", options=EP2),
    Fault("gate-and-up-of-other-experts", "gate and up of the other rank's experts",
          cut("experts.gate_up_proj", of_the_other_rank), PLACE, recipe="bf16", model="two",
          options=EP2),
    Fault("router-sharded", "each rank has its half of the router's rows, twice",
          afterwards("passes.place.Place.rewrite", router_cut), PLACE, model="two",
          options=EP2),
    Fault("experts-dealt-in-turn", "numbers of experts are dealt in turn, matrices in runs",
          placed(dealt), PLACE, options=EP2),
    Fault("places-by-expert-first", "numbers lie expert by expert, and are cut rank by rank",
          struck(here("passes.place.Constant", expert_first)), PLACE, recipe="bf16",
          model="trained", options=DP2_EP2),
    Fault("absent-experts-are-the-first", "an expert of another rank counts as the first here",
          placed(lambda e, r, own: e - r * own if e // own == r else 0, 4), PLACE, options=ALL4),
    Fault("experts-counted-in-a-lane", "experts are counted as if a lane's ranks shared them",
          placed(lambda e, r, own: -1 if r else e), PLACE, recipe="fp8", model="trained",
          options=DP2_EP2),
    Fault("tokens-gathered-before-their-norm", "tokens are gathered in front of their norm",
          inserting(PLACE, "dsa.all_gather_many", altered(0, in_front_of_norm)), PLACE,
          options=DP2),
    Fault("gathers-found-by-type", "rows of all lanes are found by their type",
          wrap("ir.edit.Editor.swap", found_by_type), "gather_quantized", recipe="fp8",
          model="wide", options=DP2_EP2),
    Fault("shared-expert-in-the-sum-already", "the shared expert is in the sum already",
          inserting(PLACE, "aten.add.Tensor", of_sum), PLACE, **TWO),
    Fault("routed-experts-twice", "routed experts twice, the shared expert not at all",
          inserting(PLACE, "aten.add.Tensor", lambda edit, op, args: (op, (args[0],
             args[0]))), PLACE, **TWO_BF16),
    Fault("vocabulary-in-another-order", "the vocabulary is gathered in another order",
          cut("lm_head.weight", of_the_other_rank), PLACE, **TWO_BF16),
    Fault("every-other-row-of-the-vocabulary", "a rank has every other row of the vocabulary",
          cut("lm_head.weight", every_other), PLACE, **TWO),
    Fault("head-cut-in-two-pieces", "a rank has a part of each half of the vocabulary",
          cutting("linear", weight=2), PLACE, options=TP2),
    Fault("columns-of-the-embedding-exchanged", "columns of the embedding are exchanged",
          cut("embed_tokens.weight", of_the_other_rank), PLACE, **TWO),
    Fault("merged-and-cut-as-one", "gate and up are merged, and cut as one",
          afterwards("passes.merge_projections.MergeProjections.rewrite", replanned("dense",
             "mlp.gate_up_proj.weight", merged_then_cut)), "merge_projections", **TWO),
    Fault("shared-expert-of-the-first-rank", "the shared expert of the first rank on every rank",
          afterwards("passes.merge_shared_expert.MergeSharedExpert.rewrite", replanned("moe", DOWN,
             shared_of_first_rank)), "merge_shared_expert", **TWO),
    Fault("block-scales-of-the-other-rank", "block scales of the other rank",
          scales("passes.quantize_projections.QuantizeProjections.rewrite", "dense",
             OUTPUT + "_scale_inv", of_the_other_rank), "quantize_projections", **BLOCKS),
    Fault("block-scales-not-sliced", "block scales are not sliced",
          scales("passes.quantize_projections.QuantizeProjections.rewrite", "moe",
             "self_attn.q_b_proj.weight_scale_inv", of_the_first_rank), "quantize_projections",
          **BLOCKS),
    Fault("block-scales-of-other-parts", "block scales of the other rank's part of experts",
          scales("passes.quantize_experts.QuantizeExperts.rewrite", "moe", DOWN + "_scale_inv",
             of_the_other_rank), "quantize_experts", **BLOCKS),
    Fault("block-scales-of-other-experts", "block scales of the other rank's experts",
          scales("passes.quantize_experts.QuantizeExperts.rewrite", "moe",
             "mlp.experts.gate_up_proj_scale_inv", of_the_other_rank), "quantize_experts",
          **{**BLOCKS, "options": EP2}),
    Fault("tokens-with-scales-of-another-kind", "gathered tokens take scales of another kind",
          inserting("gather_quantized", "dsa.quantize_blocks", negated(1)), "gather_quantized",
          **{**BLOCKS, "options": DP2_EP2}),
    Fault("scales-of-gathered-tokens-doubled", "scales of gathered tokens are doubled",
          inserting("gather_quantized", "dsa.all_gather_many", doubled_scales), "gather_quantized",
          **{**BLOCKS, "options": DP2_EP2}),
    Fault("summed-and-added-exchanged", "what is summed and what is added are exchanged",
          inserting("fuse_all_reduce_norm", "dsa.all_reduce_add_rms_norm_quantize", swapped(0, 3),
             region="moe", path="post_attention_layernorm"), "fuse_all_reduce_norm", **BLOCKS),
    Fault("eps-of-the-norm-of-a-sum", "eps of the norm of a sum",
          inserting("fuse_all_reduce_norm", "dsa.all_reduce_add_rms_norm_quantize", scaled(5, 1e4),
             region="dense"), "fuse_all_reduce_norm", **BLOCKS),
    Fault("stream-without-the-sum", "behind a norm of a sum the stream is without the sum",
          wrap("ir.edit.Editor.take", without_the_sum), "fuse_all_reduce_norm", recipe="fp8",
          model="broad", options=TP2),
    Fault("control-experts-dealt-in-turn", "experts are dealt in turn, numbers and matrices",
          both(placed(dealt), wrap("passes.place.keep_part", matrices_dealt)), options=DP2_EP2),
    Fault("control-experts-in-finer-pieces", "a rank has a part of each half of an expert",
          cutting("experts", gate_up=4, down=2), options=DP2),
)  # fmt: skip
