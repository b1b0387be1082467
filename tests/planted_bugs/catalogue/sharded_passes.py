"""Faults of passes that cut a model over ranks.

Those whose values meet wrongly no compilation lets pass; its refusal must name the pass.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

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
        def keep(whole: Any, edit: Any, program: Any, cut: Any) -> None:
            whole(edit, program, cut)
            name = cut.weight.meta["key"]
            if name.endswith(key) and edit.region.kind.startswith(kind):
                planned(program.weights, edit.region.kind, name, change)  # type: ignore[arg-type]
                planting.sites.add(edit._notes.number)

        planting.wrap("passes.sharding._keep_part", keep)

    return plant


def scales(place: str, kind: str, key: str, change: Callable[[Shard], Expr]) -> Plant:
    """Scales of a quantised weight are cut in another way."""
    return afterwards(place, replanned(kind, key, lambda expr: of_first_part(expr, change)))


def cutting(pass_name: str, change: Callable[..., Any]) -> Plant:
    """A pass cuts by ``change(Cut, weight, dim, …)``."""
    return here(f"passes.{pass_name}.Cut", change)


def placed(rule: Callable[[int, int, int], int], ranks: int = 2) -> Plant:
    """Numbers of experts on a rank are ``rule(expert, rank, experts a rank)``."""

    def constant(whole: Any, dtype: str, shape: Any, values: tuple[int, ...]) -> Any:
        count = len(values) // ranks
        every = (rule(e, r, count // ranks) for r in range(ranks) for e in range(count))
        return whole(dtype, shape, tuple(every))

    return struck_once(here("passes.shard_experts.Constant", constant))


def struck_once(plant: Plant) -> Plant:
    """It is the pass's first site, and its only one."""

    def and_noted(planting: Planting) -> None:
        planting.sites.add(1)
        plant(planting)

    return and_noted


def dealt(expert: int, rank: int, own: int) -> int:
    return expert // 2 if expert % 2 == rank else -1


def expert_first(whole: Any, dtype: str, shape: Any, values: tuple[int, ...]) -> Any:
    count = len(values) // 2
    return whole(dtype, shape, tuple(values[r * count + e] for e in range(count) for r in (0, 1)))


# Sums over ranks.
def summed(module: str, change: Callable[..., None], kind: str = "") -> Plant:
    """A pass ends a site by ``change(edit, root, part)`` in place of an all-reduce."""

    def plant(planting: Planting) -> None:
        def end(whole: Any, edit: Any, program: Any, root: Any, part: Any) -> None:
            if not edit.region.kind.startswith(kind):
                return whole(edit, program, root, part)
            planting.sites.add(edit._notes.number)
            return change(edit, root, part)

        here(f"passes.{module}.all_reduce", end)(planting)

    return plant


def unreduced(edit: Any, root: Any, part: Any) -> None:
    edit.replace(root, part)


def reduced_twice(edit: Any, root: Any, part: Any) -> None:
    once = edit.call(dsa.all_reduce.default, part, "tp", 2, before=root)
    edit.replace(root, edit.call(dsa.all_reduce.default, once, "tp", 2, before=root))


def residual_on_every_rank(edit: Any, root: Any, part: Any) -> None:
    (add,) = (user for user in root.users if user.target is aten.add.Tensor)
    (residual,) = (node for node in add.all_input_nodes if node is not root)
    both = edit.call(aten.add.Tensor, residual, part, before=add)
    edit.replace(add, edit.call(dsa.all_reduce.default, both, "tp", 2, before=add))


def averaged(edit: Any, root: Any, part: Any) -> None:
    half = edit.call(aten.mul.Tensor, part, 0.5, before=root)
    edit.replace(root, edit.call(dsa.all_reduce.default, half, "tp", 2, before=root))


def of_sum(edit: Any, op: Any, args: Any) -> Any:
    """The second term is what all ranks already added."""
    (total,) = (user for user in args[1].users if user.target is dsa.all_reduce.default)
    return op, (args[0], total)


def doubled_scales(edit: Any, op: Any, args: Any) -> Any:
    """Scales that travel are twice as large."""
    scale, *where = args
    if scale.meta["val"].dtype is not torch.float32:
        return op, args
    twice = edit.call(aten.mul.Tensor, scale, 2.0, before=node_of(edit, str(op)[:-8]))
    return op, (twice, *where)


def in_front_of_norm(own: Any) -> Any:
    return own.args[0] if own.target is dsa.rms_norm.default else own


def indexer_cut(edit: Any, program: Any, *rest: Any) -> bool:
    """Each rank scores keys with its half of the index heads, and selects for itself."""
    from dsa_compile.passes import sharding

    select = next((n for n in edit.graph.nodes if n.target is dsa.paged_index_topk.default), None)
    if select is None:
        return False
    keys = ("self_attn.indexer.wq_b.weight", "self_attn.indexer.weights_proj.weight")
    inputs = {n.meta["key"]: n for n in edit.region.inputs()}
    heads, width = 16, 32
    views = {
        n: [n.args[1][0], heads // 2, width]
        for n in edit.graph.nodes
        if n.target in (aten.view.default, aten.reshape.default)
        and list(n.args[1][1:]) == [heads, width]
    }
    root: Any = type("Found", (), {"root": select})
    cuts = [sharding.Cut(inputs[key], 0) for key in keys]
    part = sharding.compute_part(edit, program, cuts, root, views)
    assert part is not None
    edit.replace(select, part)
    return True


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
    if edit.pass_name == "join_all_gathers":
        like = old.meta["val"]
        made = [user for user in new.args[0].users if user.meta["val"].dtype is like.dtype]
        alike = [user for user in made if user.meta["val"].shape[1] == like.shape[1]]
        new = max(alike, key=lambda user: user.args[1])
    whole(edit, old, new)


def without_the_sum(whole: Any, edit: Any, several: Any, index: int, old: Any, name: str) -> None:
    if edit.pass_name == "fuse_all_reduce_norm" and index == 3:
        return edit.swap(old, several.args[3])
    return whole(edit, several, index, old, name)


def first_of_a_type(found: Any, *_: Any) -> list[Any]:
    kinds: dict[Any, Any] = {}
    for node in found:
        kinds.setdefault((node.meta["val"].dtype, node.meta["val"].shape[1]), node)
    return list(kinds.values())


ATTENTION, MLPS, EXPERTS = "shard_attention", "shard_mlps", "shard_experts"
OUTPUT, DOWN = "self_attn.o_proj.weight", "mlp.experts.down_proj_and_shared"
TWO = {"model": "two", "options": CUT2}
TWO_BF16 = {**TWO, "recipe": "bf16"}
BLOCKS = {"model": "blocks", "recipe": "fp8", "options": CUT2}
PASSES = (
    Fault("queries-of-the-other-rank", "queries of the other rank",
          cut("q_b_proj.weight", of_the_other_rank), ATTENTION, **TWO),
    Fault("every-other-heads-values", "every other head's values",
          cut("w_uv", every_other), ATTENTION, **TWO_BF16),
    Fault("halves-of-o-proj-exchanged", "the halves of o_proj are exchanged",
          cut("o_proj.weight", of_the_other_rank, "moe"), ATTENTION, **TWO_BF16),
    Fault("o-proj-cut-along-its-other-axis", "o_proj is cut along its other axis",
          cut("o_proj.weight", by_rows), ATTENTION, **TWO),
    Fault("no-all-reduce-behind-o-proj", "no all-reduce behind o_proj",
          summed(ATTENTION, unreduced, "moe"), ATTENTION, **TWO),
    Fault("o-proj-reduced-twice", "o_proj is reduced twice",
          summed(ATTENTION, reduced_twice), ATTENTION, **TWO),
    Fault("residual-on-every-rank", "the residual is added on every rank before the sum",
          summed(ATTENTION, residual_on_every_rank, "moe"), ATTENTION, **TWO),
    Fault("indexer-sharded", "each rank selects with its half of the index heads",
          afterwards("passes.shard_attention.ShardAttention.rewrite", indexer_cut), ATTENTION,
          **TWO),
    Fault("up-of-the-other-rank", "the up projection of the other rank",
          cut("up_proj.weight", of_the_other_rank, "dense"), MLPS, **TWO_BF16),
    Fault("shared-expert-reduced-twice", "the shared expert is reduced twice",
          summed(MLPS, reduced_twice, "moe"), MLPS, **TWO),
    Fault("down-of-the-first-rank", "the down projection of the first rank on every rank",
          cut("down_proj.weight", of_the_first_rank, "moe"), MLPS, **TWO),
    Fault("parts-averaged", "the parts of an MLP are averaged",
          summed(MLPS, averaged, "dense"), MLPS, **TWO_BF16),
    Fault("gate-and-up-cut-as-one", "gate and up of experts are cut as one matrix",
          cut("experts.gate_up_proj", in_one_piece), EXPERTS, **TWO),
    Fault("experts-of-the-other-rank", "each rank numbers the experts that the other has",
          placed(lambda e, r, own: e - (1 - r) * own if e // own == 1 - r else -1), EXPERTS,
          model="two", options=EP2),
    Fault("an-expert-on-both-ranks", "an expert is on both ranks",
          placed(lambda e, r, own: 0 if r and not e else e - r * own if e // own == r else -1),
          EXPERTS, model="two", options=EP2),
    Fault("gate-and-up-of-other-experts", "gate and up of the other rank's experts",
          cut("experts.gate_up_proj", of_the_other_rank), EXPERTS, recipe="bf16", model="two",
          options=EP2),
    Fault("router-sharded", "each rank has its half of the router's rows, twice",
          afterwards("passes.shard_experts.ShardExperts.rewrite", router_cut), EXPERTS, model="two",
          options=EP2),
    Fault("experts-dealt-in-turn", "numbers of experts are dealt in turn, matrices in runs",
          placed(dealt), EXPERTS, options=EP2),
    Fault("places-by-expert-first", "numbers lie expert by expert, and are cut rank by rank",
          struck_once(here("passes.shard_experts.Constant", expert_first)), EXPERTS, recipe="bf16",
          model="trained", options=DP2_EP2),
    Fault("absent-experts-are-the-first", "an expert of another rank counts as the first here",
          placed(lambda e, r, own: e - r * own if e // own == r else 0, 4), EXPERTS, options=ALL4),
    Fault("experts-counted-in-a-lane", "experts are counted as if a lane's ranks shared them",
          placed(lambda e, r, own: -1 if r else e), EXPERTS, recipe="fp8", model="trained",
          options=DP2_EP2),
    Fault("tokens-gathered-before-their-norm", "tokens are gathered in front of their norm",
          inserting(EXPERTS, "dsa.all_gather_rows", altered(0, in_front_of_norm)), EXPERTS,
          options=DP2),
    Fault("gathers-found-by-type", "rows of all lanes are found by their type",
          wrap("ir.edit.Editor.swap", found_by_type), "join_all_gathers", recipe="fp8",
          model="wide", options=DP2_EP2),
    Fault("shared-expert-in-the-sum-already", "the shared expert is in the sum already",
          inserting("join_all_reduces", "aten.add.Tensor", of_sum), "join_all_reduces", **TWO),
    Fault("routed-experts-twice", "routed experts twice, the shared expert not at all",
          inserting("join_all_reduces", "aten.add.Tensor", lambda edit, op, args: (op, (args[0],
             args[0]))), "join_all_reduces", **TWO_BF16),
    Fault("vocabulary-in-another-order", "the vocabulary is gathered in another order",
          cut("lm_head.weight", of_the_other_rank), "shard_head", **TWO_BF16),
    Fault("every-other-row-of-the-vocabulary", "a rank has every other row of the vocabulary",
          cut("lm_head.weight", every_other), "shard_head", **TWO),
    Fault("head-cut-in-two-pieces", "a rank has a part of each half of the vocabulary",
          cutting("shard_head", lambda whole, weight, dim: whole(weight, dim, stacked=2)),
          "shard_head", options=TP2),
    Fault("columns-of-the-embedding-exchanged", "columns of the embedding are exchanged",
          cut("embed_tokens.weight", of_the_other_rank), "shard_embedding", **TWO),
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
          inserting("gather_quantized", "dsa.all_gather_rows", doubled_scales), "gather_quantized",
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
          lambda planting: (placed(dealt)(planting), cutting(EXPERTS, lambda whole, weight, dim,
             **given: whole(weight, dim, stacked=weight.meta["val"].shape[0] // 2,
             **given))(planting),), options=DP2_EP2),
    Fault("control-one-gather-of-a-type", "of gathers of one type the first is joined",
          result("passes.join_all_gathers._gathers", first_of_a_type), recipe="fp8", model="wide",
          options=DP2_EP2),
    Fault("control-experts-in-finer-pieces", "a rank has a part of each half of an expert",
          cutting(EXPERTS, lambda whole, weight, dim, stacked=1, **given: whole(weight, dim,
             stacked=2 * stacked, **given)), options=DP2),
)  # fmt: skip
