"""Recognise DeepSeek Sparse Attention: index scores, top-k, and attention under the chosen mask.

Before::                                                    After::

    s = relu(matmul(f32(iq), unsqueeze(f32(ikᵀ), 1)) * scale)   idx = dsa.index_topk(
    s = squeeze(matmul(unsqueeze(iw, -2), s), -2)                   iq, ik, iw, topk, scale)
    s = masked_fill(s, ~causal, -inf)
    idx = to(topk(s, min(topk, S)).indices, int32)
    keep = ~scatter(new_ones(…), -1, idx, False)
    o = sdpa(q, k, v, causal & keep, scale)                     o = dsa.sparse_attention(
                                                                    q, k, v, idx, scale)

Two ops and not one: indices can then be shared between layers, replaced by dense ones for short
sequences, and timed apart. They are rewritten together because the reference's indices name
*future* positions where fewer than k are visible and rely on the causal mask to hide them; ours
are -1.

A layer without an indexer attends to what it is handed as ``selected``, and a layer whose selection
others attend to hands it on.

Declines: a mask other than the program's causal mask, scores in another precision than fp32,
another number of keys than the configuration's.
"""

import math

import torch
from torch import fx

from dsa_compile.ir.edit import Editor
from dsa_compile.ir.match import (
    ANY,
    Call,
    Cast,
    Const,
    Match,
    Node,
    getitem,
    match_at,
)
from dsa_compile.ir.passes import Numerics, RegionPass
from dsa_compile.ir.program import Program
from dsa_compile.ir.region import Region
from dsa_compile.ir.site import NearMiss
from dsa_compile.passes.shared import SELECTED, each_layer, value_named

aten, dsa = torch.ops.aten, torch.ops.dsa


def _attention(indices: Node) -> Call:
    causal = value_named("causal_mask")
    dropped = Call(
        aten.scatter.value,
        Call(aten.new_ones.default, ANY, ANY, dtype=torch.bool),
        -1,
        Cast(indices),
        False,
    )
    keep = Call(aten.bitwise_not.default, Call(aten.unsqueeze.default, dropped, 1))
    mask = Call(aten.__and__.Tensor, causal, keep)
    return Call(
        aten.scaled_dot_product_attention.default,
        *(Node("q"), Node("k"), Node("v"), mask),
        scale=Const("scale", float),
    )


def _indices() -> Call:
    keys = Cast(Call(aten.transpose.int, Node("k"), -1, -2))
    dots = Call(aten.matmul.default, Cast(Node("q")), Call(aten.unsqueeze.default, keys, 1))
    heads = Call(aten.relu.default, Call(aten.mul.Tensor, dots, Const("scale", float)))
    weights = Call(aten.unsqueeze.default, Node("weights", _is_fp32), -2)
    scores = Call(aten.squeeze.dim, Call(aten.matmul.default, weights, heads), -2)
    visible = Call(aten.select.int, value_named("causal_mask"), 1, 0)
    masked = Call(
        aten.masked_fill.Scalar, scores, Call(aten.bitwise_not.default, visible), -math.inf
    )
    return getitem(Call(aten.topk.default, masked, ANY, name="topk"), 1, shared=True)


def _is_fp32(node: fx.Node) -> str | None:
    dtype = node.meta["val"].dtype
    return None if dtype is torch.float32 else f"head weights are {dtype}, not float32"


def _keeps(chosen: fx.Node, topk: int) -> bool:
    """Whether a top-k keeps ``topk`` keys, or all where there are fewer."""
    count = chosen.args[1]
    if isinstance(count, fx.Node):
        return count.target is torch.sym_min and topk in count.args
    return bool(count == topk)


class RecognizeSparseAttention(RegionPass):
    """Scores, top-k, scattered mask and SDPA become two ops."""

    numerics = Numerics.TOLERANCE  # SDPA sums in another order
    requires = ("functionalize",)

    def expects(self, program: Program, region: Region) -> int | None:
        """Every layer is sparse."""
        return each_layer(program, region)

    def rewrite(self, edit: Editor, program: Program) -> None:
        """Match attention first, then the scoring behind its indices."""
        layer = program.layer_kind(edit.region)
        if layer is None:
            return
        indices = Node("indices") if layer.indexer else value_named(SELECTED)
        for attention in edit.matches(_attention(indices)):
            if not layer.indexer:
                self._attend(edit, attention, attention[SELECTED])
                continue
            scoring = match_at(attention["indices"], _indices())
            if isinstance(scoring, NearMiss):
                edit.note([scoring])
                continue
            chosen, topk = scoring["topk"], program.spec.index_topk
            if not _keeps(chosen, topk):
                edit.decline(chosen, f"keeps {chosen.args[1]} keys, not index_topk={topk}")
                continue
            selected = self._select(edit, attention, scoring, topk)
            self._attend(edit, attention, selected)

    def _select(self, edit: Editor, attention: Match, scoring: Match, topk: int) -> fx.Node:
        args = (scoring["q"], scoring["k"], scoring["weights"], topk, scoring["scale"])
        indices = edit.call(dsa.index_topk.default, *args, before=attention.root)
        if SELECTED in edit.region.outputs:
            edit.returns(SELECTED, indices)
        return indices

    def _attend(self, edit: Editor, attention: Match, indices: fx.Node) -> None:
        root = attention.root
        # the reference keeps heads before tokens; ours come after, and token_major cleans up
        q, k, v = (
            edit.call(aten.transpose.int, attention[name], 1, 2, before=root) for name in "qkv"
        )
        out = edit.call(
            dsa.sparse_attention.default, q, k, v, indices, attention["scale"], before=root
        )
        edit.swap(root, edit.call(aten.transpose.int, out, 1, 2, before=root))
        edit.erase(root)  # fx takes it for random, because of its dropout, and would keep it
        edit.close_site()
