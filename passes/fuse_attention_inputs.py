"""One op for what attention makes of its merged first projection.

Before::                                        After::

    a, k, kv = split(y, [Rq, D, R + dr], -1)        q, s = dsa.attention_inputs_fp8(
    q, s = dsa.rms_norm_quantize(a, wq, e, u)               y, wq, e, wk, bk, ek, wkv, ekv, cos,
    dsa.write_index_key_fp8(k, wk, bk, ek, cos,             sin, True, False, u, latent, index,
            sin, False, index, slots)                       slots)
    dsa.norm_rope_write_latent_cache_fp8(kv,
            wkv, ekv, cos, sin, True, u, latent,
            slots)

The three have nothing to do with one another but what they read; at a few tokens a launch costs as
much as any of them. Rows under one scale (``dsa.norm_rope_write_latent_cache_fp8_tensor``) bring
that scale.

Declines: parts that other calls use too, and scales of different formats.
"""

from typing import Any

import torch

from dsa_compile.facts.formats import E4M3_ROWS, kept_in
from dsa_compile.ir.edit import Editor
from dsa_compile.ir.match import Call, Const, Match, Node, getitem
from dsa_compile.ir.passes import RegionPass
from dsa_compile.ir.program import Program
from dsa_compile.ir.region import Region
from dsa_compile.passes.fuse_norm_quantize import take_quantized
from dsa_compile.passes.shared import each_indexer

aten, dsa = torch.ops.aten, torch.ops.dsa


def _part(index: int) -> Call:
    widths = [Const("query", int), Const("key", int), Const("latent", int)]
    # each of the three patterns sees the split as one that others use as well
    return getitem(
        Call(aten.split_with_sizes.default, Node("merged"), widths, -1, shared=True), index
    )


def _query_pattern() -> Call:
    return Call(
        dsa.rms_norm_quantize.default,
        *(_part(0), Node("weight"), Const("eps", float), Const("ue8m0", bool)),
    )


def _key_pattern() -> Call:
    norm = (Node("weight"), Node("bias"), Const("eps", float))
    rope = (Node("cos"), Node("sin"), Const("interleaved", bool))
    return Call(
        dsa.write_index_key_fp8.default, _part(1), *norm, *rope, Node("cache"), Node("slots")
    )


def _latent_pattern(op: Any, scales: Const | Node) -> Call:
    norm = (_part(2), Node("weight"), Const("eps", float))
    rope = (Node("cos"), Node("sin"), Const("interleaved", bool))
    return Call(op, *norm, *rope, scales, Node("cache"), Node("slots"))


def _block_rows() -> Call:
    return _latent_pattern(dsa.norm_rope_write_latent_cache_fp8.default, Const("ue8m0", bool))


def _tensor_rows() -> Call:
    return _latent_pattern(dsa.norm_rope_write_latent_cache_fp8_tensor.default, Node("scale"))


class FuseAttentionInputs(RegionPass):
    """Query norm, index key and latent row become ``dsa.attention_inputs_fp8``."""

    requires = (
        "merge_projections",
        "fuse_norm_quantize",
        "quantize_indexer",
        "quantize_latent_cache",
    )
    formats = kept_in(activations=E4M3_ROWS, index_rows=E4M3_ROWS)

    def expects(self, program: Program, region: Region) -> int | None:
        """One in every layer that has an indexer."""
        return each_indexer(program, region)

    def rewrite(self, edit: Editor, program: Program) -> None:
        """Fuse the three consumers of one projection."""
        patterns = (_query_pattern, _key_pattern, _block_rows, _tensor_rows)
        queries, keys, *rows = (edit.matches(pattern()) for pattern in patterns)
        for query in queries:
            key, latent = (
                next((m for m in found if m["merged"] is query["merged"]), None)
                for found in (keys, [*rows[0], *rows[1]])
            )
            if key is None or latent is None:
                continue
            if reason := _differ(query, key, latent):
                edit.decline(latent, reason)
                continue
            self._fuse(edit, query, key, latent)

    def _fuse(self, edit: Editor, query: Match, key: Match, latent: Match) -> None:
        args = (
            *(query["merged"], query["weight"], query["eps"]),
            *(key["weight"], key["bias"], key["eps"]),
            *(latent["weight"], latent["eps"], latent["cos"], latent["sin"]),
            *(latent["interleaved"], key["interleaved"], query["ue8m0"]),
            *(latent["cache"], key["cache"], latent["slots"]),
            *([latent["scale"]] if "scale" in latent.bound else []),
        )
        new = edit.call(dsa.attention_inputs_fp8.default, *args, before=query.root)
        take_quantized(edit, new, 0, query.root)
        edit.erase(key.root)
        edit.erase(latent.root)
        edit.close_site()


def _differ(query: Match, key: Match, latent: Match) -> str | None:
    if query["ue8m0"] is not latent.bound.get("ue8m0", query["ue8m0"]):
        return f"scales of the query ue8m0={query['ue8m0']}, of the row {latent['ue8m0']}"
    for name in ("cos", "sin", "slots"):
        if key[name] is not latent[name]:
            return f"key and row differ in {name}"
    return None
