"""Planted bugs of several ranks: wrong cuts, wrong collectives, wrong scales of a rank's blocks.

Most leave graphs that are sound, with weights of another rank or of none; those whose values meet
wrongly (``structural``) no compilation lets pass, and the tools must still name where they began.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from dsa_compile.facts.layout import Layout
from dsa_compile.ir.edit import Editor
from dsa_compile.ir.program import Program
from dsa_compile.passes import (
    shard_attention,
    shard_experts,
    shard_mlps,
    sharding,
)
from dsa_compile.passes.merge_projections import MergeProjections
from dsa_compile.passes.merge_shared_expert import MergeSharedExpert
from dsa_compile.passes.quantize_experts import QuantizeExperts
from dsa_compile.passes.quantize_projections import QuantizeProjections
from dsa_compile.passes.shard_attention import ShardAttention
from dsa_compile.weights.plan import Concat, Constant, Expr, Narrow, Reshape, Shard, Transpose
from tests.planted_bugs.alterations import replanned
from tests.planted_bugs.planting import (
    Plant,
    PlantedBug,
    Struck,
    afterwards,
    inserting,
    node_of,
    planned,
    scaled,
    swapped,
)

aten, dsa = torch.ops.aten, torch.ops.dsa

TP2 = Layout(tp=2, shard_embedding=True)
EP2 = replace(TP2, ep=2)
LANES2 = Layout(dp=2, ep=2)


@dataclass(frozen=True)
class ShardingBug(PlantedBug):
    """A planted bug, with the layout that shows it.

    Attributes:
        layout: to compile with.
        structural: whether the check of what values are on each rank refuses the program.
    """

    layout: Layout = TP2
    structural: bool = False


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


def cut_otherwise(key: str, change: Callable[[Shard], Expr], kind: str = "") -> Plant:
    """A weight is cut in another way, in regions of a kind or in all."""

    def plant(patch: Any, struck: Struck) -> None:
        keep = sharding._keep_part

        def wrong(edit: Editor, program: Program, cut: Any) -> None:
            keep(edit, program, cut)
            name = cut.weight.meta["key"]
            if name.endswith(key) and edit.region.kind.startswith(kind):
                planned(program.weights, edit.region.kind, name, change)  # type: ignore[arg-type]
                struck.sites.add(edit._notes.number)

        patch.setattr(sharding, "_keep_part", wrong)

    return plant


def summed(module: Any, change: Callable[..., None], kind: str = "") -> Plant:
    """Plant of a change in place of a pass's all-reduce, in regions of a kind or in all."""

    def plant(patch: Any, struck: Struck) -> None:
        whole = module.all_reduce

        def wrong(edit: Editor, program: Program, root: fx.Node, part: fx.Node) -> None:
            if not edit.region.kind.startswith(kind):
                return whole(edit, program, root, part)
            struck.sites.add(edit._notes.number)
            return change(edit, program, root, part)

        patch.setattr(module, "all_reduce", wrong)

    return plant


def placed(change: Callable[[tuple[int, ...]], tuple[int, ...]]) -> Plant:
    """The numbers of experts on their ranks are others."""

    def plant(patch: Any, struck: Struck) -> None:
        struck.sites.add(1)

        def wrong(dtype: str, shape: tuple[int, ...], values: tuple[int, ...]) -> Constant:
            return Constant(dtype, shape, change(values))

        patch.setattr(shard_experts, "Constant", wrong)

    return plant


def unreduced(edit: Editor, program: Program, root: fx.Node, part: fx.Node) -> None:
    edit.replace(root, part)


def reduced_twice(edit: Editor, program: Program, root: fx.Node, part: fx.Node) -> None:
    once = edit.call(dsa.all_reduce.default, part, "tp", 2, before=root)
    edit.replace(root, edit.call(dsa.all_reduce.default, once, "tp", 2, before=root))


def residual_on_every_rank(edit: Editor, program: Program, root: fx.Node, part: fx.Node) -> None:
    (add,) = (user for user in root.users if user.target is aten.add.Tensor)
    (residual,) = (node for node in add.all_input_nodes if node is not root)
    both = edit.call(aten.add.Tensor, residual, part, before=add)
    edit.replace(add, edit.call(dsa.all_reduce.default, both, "tp", 2, before=add))


def averaged(edit: Editor, program: Program, root: fx.Node, part: fx.Node) -> None:
    half = edit.call(aten.mul.Tensor, part, 0.5, before=root)
    edit.replace(root, edit.call(dsa.all_reduce.default, half, "tp", 2, before=root))


def indexer_cut(edit: Editor, program: Program, *rest: Any) -> bool:
    """Each rank scores keys with its half of the index heads, and selects for itself."""
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
    root = type("Found", (), {"root": select})
    part = sharding.compute_part(
        edit, program, [sharding.Cut(inputs[key], 0) for key in keys], root, views
    )
    edit.replace(select, part)
    return True


def router_cut(edit: Editor, program: Program, *rest: Any) -> bool:
    """Each rank has its half of the router's rows, twice."""
    if edit.region.kind != "moe":
        return False

    def half(expr: Expr) -> Expr:
        shard = Shard("tp", 2, 0, 8, expr)
        return Concat(0, (shard, shard))

    planned(program.weights, "moe", "mlp.gate.weight", half)
    return True


def of_sum(edit: Editor, op: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """The second term is what all ranks already added."""
    (total,) = (user for user in args[1].users if user.target is dsa.all_reduce.default)
    return op, (args[0], total)


def first_twice(edit: Editor, op: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    return op, (args[0], args[0])


def of_other_scales(edit: Editor, op: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """Scales are powers of two where they should be none, or the other way round."""
    return op, (args[0], not args[1])


def doubled_scales(edit: Editor, op: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """Scales that travel are twice as large."""
    scale, *where = args
    if scale.meta["val"].dtype is not torch.float32:
        return op, args
    twice = edit.call(aten.mul.Tensor, scale, 2.0, before=node_of(edit, op))
    return op, (twice, *where)


def merged_then_cut(expr: Expr) -> Expr:
    """Gate and up, one upon the other, cut as one matrix."""
    assert isinstance(expr, Concat)
    cuts = [part for part in expr.parts if isinstance(part, Shard)]
    whole = Concat(0, tuple(cut.of for cut in cuts))
    return replace(cuts[0], of=whole, length=sum(cut.length for cut in cuts))


def shared_of_first_rank(expr: Expr) -> Expr:
    """The shared expert's part of one rank on each of them."""
    assert isinstance(expr, Concat)
    routed, shared = expr.parts
    assert isinstance(shared, Reshape)
    assert isinstance(shared.of, Shard)
    return replace(expr, parts=(routed, replace(shared, of=of_the_first_rank(shared.of))))


def of_first_part(expr: Expr, change: Callable[[Shard], Expr]) -> Expr:
    if isinstance(expr, Concat):
        return replace(expr, parts=(of_first_part(expr.parts[0], change), *expr.parts[1:]))
    assert isinstance(expr, Shard)
    return change(expr)


def scales(owner: Any, kind: str, key: str, change: Callable[[Shard], Expr]) -> Plant:
    """Scales of a quantised weight are cut in another way."""
    return afterwards(owner, "rewrite", replanned(kind, key, lambda e: of_first_part(e, change)))


SHARDING = (
    ShardingBug("queries of the other rank", "shard_attention",
                cut_otherwise("q_b_proj.weight", of_the_other_rank)),
    ShardingBug("every other head's values", "shard_attention",
                cut_otherwise("w_uv", every_other), recipe="bf16"),
    ShardingBug("halves of o_proj exchanged", "shard_attention",
                cut_otherwise("o_proj.weight", of_the_other_rank, "moe"), recipe="bf16"),
    ShardingBug("o_proj cut along its other axis", "shard_attention",
                cut_otherwise("o_proj.weight", by_rows)),
    ShardingBug("no all-reduce behind o_proj", "shard_attention",
                summed(shard_attention, unreduced, "moe"), structural=True),
    ShardingBug("o_proj reduced twice", "shard_attention",
                summed(shard_attention, reduced_twice), structural=True),
    ShardingBug("residual added on every rank before the sum", "shard_attention",
                summed(shard_attention, residual_on_every_rank, "moe"), structural=True),
    ShardingBug("indexer sharded", "shard_attention",
                afterwards(ShardAttention, "rewrite", indexer_cut), structural=True),
    ShardingBug("up of the other rank", "shard_mlps",
                cut_otherwise("up_proj.weight", of_the_other_rank, "dense"), recipe="bf16"),
    ShardingBug("shared expert reduced twice", "shard_mlps",
                summed(shard_mlps, reduced_twice, "moe"), structural=True),
    ShardingBug("down of the first rank on every rank", "shard_mlps",
                cut_otherwise("down_proj.weight", of_the_first_rank, "moe")),
    ShardingBug("parts of an MLP averaged", "shard_mlps",
                summed(shard_mlps, averaged, "dense"), recipe="bf16"),
    ShardingBug("gate and up of experts cut as one", "shard_experts",
                cut_otherwise("experts.gate_up_proj", in_one_piece)),
    ShardingBug("experts of the other rank", "shard_experts",
                placed(lambda v: (*v[len(v) // 2 :], *v[: len(v) // 2])), layout=EP2),
    ShardingBug("an expert on both ranks", "shard_experts",
                placed(lambda v: (*v[: len(v) // 2], 0, *v[len(v) // 2 + 1 :])), layout=EP2),
    ShardingBug("gate and up of the other rank's experts", "shard_experts",
                cut_otherwise("experts.gate_up_proj", of_the_other_rank), "bf16", layout=EP2),
    ShardingBug("router sharded", "shard_experts",
                afterwards(shard_experts.ShardExperts, "rewrite", router_cut), layout=EP2,
                structural=True),
    ShardingBug("shared expert in the sum already", "join_all_reduces",
                inserting("join_all_reduces", aten.add.Tensor, of_sum), structural=True),
    ShardingBug("routed experts twice, shared expert not at all", "join_all_reduces",
                inserting("join_all_reduces", aten.add.Tensor, first_twice), recipe="bf16"),
    ShardingBug("vocabulary gathered in another order", "shard_head",
                cut_otherwise("lm_head.weight", of_the_other_rank), recipe="bf16"),
    ShardingBug("every other row of the vocabulary", "shard_head",
                cut_otherwise("lm_head.weight", every_other)),
    ShardingBug("columns of the embedding exchanged", "shard_embedding",
                cut_otherwise("embed_tokens.weight", of_the_other_rank)),
    ShardingBug("gate and up merged, and cut as one", "merge_projections",
                afterwards(MergeProjections, "rewrite",
                           replanned("dense", "mlp.gate_up_proj.weight", merged_then_cut))),
    ShardingBug("shared expert of the first rank on every rank", "merge_shared_expert",
                afterwards(MergeSharedExpert, "rewrite",
                           replanned("moe", "mlp.experts.down_proj_and_shared",
                                     shared_of_first_rank))),
    ShardingBug("block scales of the other rank", "quantize_projections",
                scales(QuantizeProjections, "dense", "self_attn.o_proj.weight_scale_inv",
                       of_the_other_rank), recipe="fp8"),
    ShardingBug("block scales not sliced", "quantize_projections",
                scales(QuantizeProjections, "moe", "self_attn.q_b_proj.weight_scale_inv",
                       of_the_first_rank), recipe="fp8"),
    ShardingBug("block scales of the other rank's part of experts", "quantize_experts",
                scales(QuantizeExperts, "moe", "mlp.experts.down_proj_and_shared_scale_inv",
                       of_the_other_rank), recipe="fp8"),
    ShardingBug("block scales of the other rank's experts", "quantize_experts",
                scales(QuantizeExperts, "moe", "mlp.experts.gate_up_proj_scale_inv",
                       of_the_other_rank), recipe="fp8", layout=EP2),
    ShardingBug("tokens quantised with scales of another kind", "gather_quantized",
                inserting("gather_quantized", dsa.quantize_blocks.default, of_other_scales),
                recipe="fp8", layout=LANES2),
    ShardingBug("scales of gathered tokens doubled", "gather_quantized",
                inserting("gather_quantized", dsa.all_gather_rows.default, doubled_scales),
                recipe="fp8", layout=LANES2),
    ShardingBug("what is summed and what is added exchanged", "fuse_all_reduce_norm",
                inserting("fuse_all_reduce_norm", dsa.all_reduce_add_rms_norm_quantize.default,
                          swapped(0, 3), region="moe", path="post_attention_layernorm"),
                recipe="fp8", structural=True),
    ShardingBug("eps of the norm of a sum", "fuse_all_reduce_norm",
                inserting("fuse_all_reduce_norm", dsa.all_reduce_add_rms_norm_quantize.default,
                          scaled(5, 1e4), region="dense"), recipe="fp8"),
)  # fmt: skip
