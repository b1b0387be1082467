"""Give every layer its paged caches and let attention read them.

Before (one sequence)::                         After (many requests)::

    idx = dsa.index_topk(iq, ik, iw, k, s)          dsa.write_index_cache(ik, index_cache, slots)
    o = dsa.latent_attention(                       idx = dsa.paged_index_topk(iq, iw, index_cache,
            q, q_pe, ckv, k_pe, idx, scale)                 block_tables, cu_seqlens, context_lens…)
                                                    dsa.write_latent_cache(ckv, k_pe, latent_cache…)
                                                    o = dsa.paged_latent_attention(
                                                            q, q_pe, latent_cache, idx, scale)

Indices become physical rows (block * block_size + offset): latent KV and indexer keys live under
one block id, so one number finds both. Keys are written before they are read, in the same step.

A layer without an indexer has the latent cache alone; the selection that it is handed is of rows
from now on.
"""

import torch
from torch import fx

from dsa_compile.ir.edit import Editor
from dsa_compile.ir.match import Call, Const, Match, Node
from dsa_compile.ir.passes import Numerics, RegionPass
from dsa_compile.ir.program import Program
from dsa_compile.ir.region import Region, Role
from dsa_compile.passes.shared import SELECTED, each_layer, value_named

dsa = torch.ops.dsa

LATENT_CACHE, INDEX_CACHE = "latent_cache", "index_cache"


def _selection() -> Call:
    return Call(
        dsa.index_topk.default,
        *(Node("iq"), Node("ik"), Node("iw"), Const("topk", int), Const("index_scale", float)),
        name="indices",
        shared=True,  # may be handed on to layers without an indexer
    )


def _pattern(indexer: bool) -> Call:
    indices = _selection() if indexer else value_named(SELECTED)
    return Call(
        dsa.latent_attention.default,
        *(Node("q"), Node("q_pe"), Node("ckv"), Node("k_pe"), indices, Const("scale", float)),
    )


class InsertPagedCaches(RegionPass):
    """Dense sparse attention becomes cache writes and paged reads."""

    numerics = Numerics.TOLERANCE  # sums run over gathered rows, in another order
    requires = ("flatten_tokens",)

    def expects(self, program: Program, region: Region) -> int | None:
        """The latent cache of every layer, and with it the index cache of those that have one."""
        return each_layer(program, region)

    def rewrite(self, edit: Editor, program: Program) -> None:
        """Replace every match."""
        layer = program.layer_kind(edit.region)
        if layer is None:
            return
        for m in edit.matches(_pattern(layer.indexer)):
            edit.begin_site()
            row = ("P", program.config.block_size, program.spec.latent_width(layer))
            latent = edit.input(Role.CACHE, LATENT_CACHE, row, program.config.dtype)
            rows = self._select(edit, program, m) if layer.indexer else m[SELECTED]
            self._attend(edit, m, latent, rows)

    def _select(self, edit: Editor, program: Program, m: Match) -> fx.Node:
        """Score the keys in the cache; gives the rows that take the place of positions."""
        page = ("P", program.config.block_size)
        keys = (*page, program.spec.index_head_dim)
        cache = edit.input(Role.CACHE, INDEX_CACHE, keys, program.config.dtype)
        slots = edit.input(Role.BATCH, "slot_mapping", ("T",), torch.int64)
        tables = edit.input(Role.BATCH, "block_tables", ("R", "M"), torch.int32)
        starts = edit.input(Role.BATCH, "cu_seqlens", ("R+1",), torch.int32)
        lengths = edit.input(Role.BATCH, "context_lens", ("R",), torch.int32)
        at = m["indices"]
        edit.call(dsa.write_index_cache.default, m["ik"], cache, slots, before=at)
        rows = edit.call(
            dsa.paged_index_topk.default,
            *(m["iq"], m["iw"], cache, tables, starts, lengths, m["topk"], m["index_scale"]),
            before=at,
        )
        edit.swap(at, rows)
        return rows

    def _attend(self, edit: Editor, m: Match, latent: fx.Node, rows: fx.Node) -> None:
        """Write the latents of a step's tokens and attend to those of the chosen rows."""
        root = m.root
        slots = edit.input(Role.BATCH, "slot_mapping", ("T",), torch.int64)
        edit.call(dsa.write_latent_cache.default, m["ckv"], m["k_pe"], latent, slots, before=root)
        args = (m["q"], m["q_pe"], latent, rows, m["scale"])
        edit.replace(root, edit.call(dsa.paged_latent_attention.default, *args, before=root))
