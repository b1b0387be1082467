"""Latent cache in FP8: normed, rotated, quantised and written in one op, read by its own attention.

Before::                                        After::

    c, r = split(kv, [R, dr], -1)                   dsa.norm_rope_write_latent_cache_fp8(
    ckv = dsa.rms_norm(c, weight, eps)                      kv, weight, eps, cos, sin, True, ue8m0,
    pe = dsa.rope_interleaved(view(r), cos, sin)            cache_fp8, slots)
    dsa.write_latent_cache(ckv, pe, cache, slots)   o = dsa.paged_latent_attention_fp8(
    o = dsa.paged_latent_attention(q, q_pe,                 q, q_pe, cache_fp8, rows, scale)
            cache, rows, scale)

A row is R e4m3 values, an fp32 scale for every 128 of them, and the rotated key in
bf16, unquantised: 656 bytes instead of 1,152 at the published geometry (FlashMLA's layout).

Declines: a latent or rotated key that something else reads too.
"""

import torch

from dsa_compile.ir.edit import Editor
from dsa_compile.ir.match import ANY, Call, Const, Match, Node, calls, find, getitem
from dsa_compile.ir.passes import Numerics, RegionPass
from dsa_compile.ir.program import Program
from dsa_compile.ir.region import Region
from dsa_compile.ops.fused_cache import fp8_row_bytes
from dsa_compile.passes.quantized_weights import power_of_two_scales
from dsa_compile.passes.shared import each_layer, value_named

aten, dsa = torch.ops.aten, torch.ops.dsa


def _pattern() -> Call:
    widths = [Const("rank", int), Const("rope", int)]
    parts = Call(aten.split_with_sizes.default, Node("kv"), widths, -1)
    latent = Call(dsa.rms_norm.default, getitem(parts, 0), Node("weight"), Const("eps", float))
    heads = Call(aten.view.default, getitem(parts, 1), ANY)
    tables = (value_named("cos"), value_named("sin"))
    rotated = Call(dsa.rope_interleaved.default, heads, *tables)
    key = Call(aten.squeeze.dim, rotated, 1)
    return Call(dsa.write_latent_cache.default, latent, key, Node("cache"), Node("slots"))


class QuantizeLatentCache(RegionPass):
    """Both sides of the latent cache move to FP8 rows."""

    numerics = Numerics.TOLERANCE
    requires = ("insert_paged_caches", "recognize_rms_norm", "recognize_rope_interleaved")
    recipes = ("fp8",)

    def expects(self, program: Program, region: Region) -> int | None:
        """The latent cache of every layer."""
        return each_layer(region, 1)

    def rewrite(self, edit: Editor, program: Program) -> None:
        """Replace every write, and the reads of what it writes."""
        matches = find(edit.graph, _pattern())
        edit.note(matches.misses)
        for m in matches.found:
            self._quantize(edit, program, m)

    def _quantize(self, edit: Editor, program: Program, m: Match) -> None:
        cache, write = m["cache"], m.root
        width = fp8_row_bytes(m["rank"], m["rope"])
        formats = (True, power_of_two_scales(program))  # interleaved, ue8m0
        pages = cache.meta["val"].shape
        reads = [
            n for n in calls(edit.graph, dsa.paged_latent_attention.default) if cache in n.args
        ]
        edit.retype(cache, ("P", int(pages[1]), width), torch.uint8)
        edit.call(
            dsa.norm_rope_write_latent_cache_fp8.default,
            *(m["kv"], m["weight"], m["eps"], m["cos"], m["sin"], *formats, cache),
            m["slots"],
            before=write,
        )
        edit.erase(write)
        for read in reads:
            new = edit.call(dsa.paged_latent_attention_fp8.default, *read.args, before=read)
            edit.swap(read, new)
        edit.rewrites += 1
