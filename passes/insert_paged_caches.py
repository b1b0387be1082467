"""Give every layer its two paged caches and let attention read them.

Before (one sequence)::                         After (many requests)::

    idx = dsa.index_topk(iq, ik, iw, k, s)          dsa.write_index_cache(ik, index_cache, slots)
    o = dsa.latent_attention(                       idx = dsa.paged_index_topk(iq, iw, index_cache,
            q, q_pe, ckv, k_pe, idx, scale)                 block_tables, cu_seqlens, context_lens…)
                                                    dsa.write_latent_cache(ckv, k_pe, latent_cache…)
                                                    o = dsa.paged_latent_attention(
                                                            q, q_pe, latent_cache, idx, scale)

Indices become physical rows (block * block_size + offset): latent KV and indexer keys live under
one block id, so one number finds both. Keys are written before they are read, in the same step.
"""

import torch

from dsa_compile.ir.edit import Editor
from dsa_compile.ir.match import Call, Const, Match, Node, find
from dsa_compile.ir.passes import Numerics, RegionPass
from dsa_compile.ir.program import Program
from dsa_compile.ir.region import Region, Role
from dsa_compile.passes.shared import each_layer

dsa = torch.ops.dsa

LATENT_CACHE, INDEX_CACHE = "latent_cache", "index_cache"


def _pattern() -> Call:
    indices = Call(
        dsa.index_topk.default,
        *(Node("iq"), Node("ik"), Node("iw"), Const("topk", int), Const("index_scale", float)),
        name="indices",
    )
    return Call(
        dsa.latent_attention.default,
        *(Node("q"), Node("q_pe"), Node("ckv"), Node("k_pe"), indices, Const("scale", float)),
    )


class InsertPagedCaches(RegionPass):
    """Dense sparse attention becomes cache writes and paged reads."""

    numerics = Numerics.TOLERANCE  # sums run over gathered rows, in another order
    requires = ("flatten_tokens",)

    def expects(self, program: Program, region: Region) -> int | None:
        """Both caches in every layer."""
        return each_layer(region, 1)

    def rewrite(self, edit: Editor, program: Program) -> None:
        """Replace every match."""
        matches = find(edit.graph, _pattern())
        edit.note(matches.misses)
        for m in matches.found:
            self._page(edit, program, m)

    def _page(self, edit: Editor, program: Program, m: Match) -> None:
        spec, config, root = program.spec, program.config, m.root
        page = ("P", config.block_size)
        latent = edit.input(Role.CACHE, LATENT_CACHE, (*page, spec.latent_width), config.dtype)
        keys = edit.input(Role.CACHE, INDEX_CACHE, (*page, spec.index_head_dim), config.dtype)
        slots = edit.input(Role.BATCH, "slot_mapping", ("T",), torch.int64)
        tables = edit.input(Role.BATCH, "block_tables", ("R", "M"), torch.int32)
        starts = edit.input(Role.BATCH, "cu_seqlens", ("R+1",), torch.int32)
        lengths = edit.input(Role.BATCH, "context_lens", ("R",), torch.int32)
        at = m["indices"]
        edit.call(dsa.write_index_cache.default, m["ik"], keys, slots, before=at)
        rows = edit.call(
            dsa.paged_index_topk.default,
            *(m["iq"], m["iw"], keys, tables, starts, lengths, m["topk"], m["index_scale"]),
            before=at,
        )
        edit.call(dsa.write_latent_cache.default, m["ckv"], m["k_pe"], latent, slots, before=root)
        args = (m["q"], m["q_pe"], latent, rows, m["scale"])
        edit.replace(root, edit.call(dsa.paged_latent_attention.default, *args, before=root))
