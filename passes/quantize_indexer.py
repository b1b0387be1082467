"""The lightning indexer in FP8: rotated, turned by a Hadamard matrix and quantised, both sides.

Before::                                        After::

    k = dsa.layer_norm(x, w, b, eps)                dsa.write_index_key_fp8(x, w, b, eps, cos, sin,
    k = cat(dsa.rope_half(k[:dr]), k[dr:])                  False, cache_fp8, slots)
    dsa.write_index_cache(k, cache, slots)          q8, w8 = dsa.index_query_quantize(
    q = cat(dsa.rope_half(q[:dr]), q[dr:])                  q, weights, cos, sin, False, scale)
    rows = dsa.paged_index_topk(q, weights,         rows = dsa.paged_index_topk_fp8(q8, w8,
            cache, …, topk, scale)                          cache_fp8, …, topk)

The scale of the products and the queries' own scales go into the fp32 head weights: a positive
factor may leave the ReLU. ``False`` is for halves; ``dsa.rope_interleaved`` in both places gives
``True``.

Declines: queries or keys rotated otherwise or read elsewhere too.
"""

from typing import Any

import torch

from dsa_compile.facts.formats import E4M3_ROWS, kept_in
from dsa_compile.ir.edit import Editor
from dsa_compile.ir.match import Call, Const, Match, Node, getitem
from dsa_compile.ir.passes import Numerics, RegionPass
from dsa_compile.ir.program import Program
from dsa_compile.ir.region import Region
from dsa_compile.ops.index_fused import SCALE_BYTES
from dsa_compile.passes.shared import each_indexer, value_named

aten, dsa = torch.ops.aten, torch.ops.dsa


def _rotated(vectors: Call | Node, rope: Any) -> Call:
    """``vectors`` ``[T, heads, D]`` with their first values rotated by the op ``rope``."""
    parts = Call(
        aten.split_with_sizes.default, vectors, [Const("rope", int), Const("rest", int)], -1
    )
    first = Call(rope, getitem(parts, 0), value_named("cos"), value_named("sin"))
    return Call(aten.cat.default, [first, getitem(parts, 1)], -1)


def _write_pattern(rope: Any) -> Call:
    norm = Call(
        dsa.layer_norm.default, *(Node("k"), Node("weight"), Node("bias"), Const("eps", float))
    )
    key = Call(aten.squeeze.dim, _rotated(Call(aten.unsqueeze.default, norm, 1), rope), 1)
    return Call(dsa.write_index_cache.default, key, Node("cache"), Node("slots"))


def _select_pattern(rope: Any) -> Call:
    batch = (Node("tables"), Node("starts"), Node("lengths"))
    return Call(
        dsa.paged_index_topk.default,
        *(_rotated(Node("q"), rope), Node("weights"), Node("cache"), *batch),
        *(Const("topk", int), Const("scale", float)),
    )


class QuantizeIndexer(RegionPass):
    """Both sides of the index cache move to FP8 pages."""

    numerics = Numerics.TOLERANCE
    requires = (
        "insert_paged_caches",
        "recognize_layer_norm",
        "recognize_rope_half",
        "recognize_rope_interleaved",
    )
    formats = kept_in(index_rows=E4M3_ROWS, index_queries=E4M3_ROWS)

    def expects(self, program: Program, region: Region) -> int | None:
        """The indexer of every layer."""
        return each_indexer(program, region)

    def rewrite(self, edit: Editor, program: Program) -> None:
        """Replace the write and the selection together: they share the cache."""
        interleaved = program.spec.index_rope_interleaved
        rope = dsa.rope_interleaved.default if interleaved else dsa.rope_half.default
        by_cache = {write["cache"]: write for write in edit.matches(_write_pattern(rope))}
        for selection in edit.matches(_select_pattern(rope)):
            write = by_cache.get(selection["cache"])
            if write is None:
                cache = selection["cache"]
                reason = f"reads {cache}, which no key fit to be quantised is written to"
                edit.decline(selection.root, reason)
            else:
                self._quantize(edit, write, selection, interleaved)

    def _quantize(self, edit: Editor, write: Match, selection: Match, interleaved: bool) -> None:
        cache = write["cache"]
        block_size, dim = (int(n) for n in cache.meta["val"].shape[1:])
        edit.retype(cache, ("P", block_size, dim + SCALE_BYTES), torch.uint8)
        key = [write[name] for name in ("k", "weight", "bias", "eps", "cos", "sin")]
        edit.call(
            *(dsa.write_index_key_fp8.default, *key, interleaved, cache, write["slots"]),
            before=write.root,
        )
        edit.erase(write.root)
        s, at = selection, selection.root
        query = (s["q"], s["weights"], s["cos"], s["sin"], interleaved, s["scale"])
        pair = edit.call(dsa.index_query_quantize.default, *query, before=at)
        q, weights = edit.unpack(pair, "index_q", "index_weights", before=at)
        batch = (s["tables"], s["starts"], s["lengths"], s["topk"])
        new = edit.call(dsa.paged_index_topk_fp8.default, q, weights, cache, *batch, before=at)
        edit.replace(at, new)
