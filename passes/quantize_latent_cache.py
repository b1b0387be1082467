"""Latent cache in FP8: normed, rotated, quantised and written in one op, read by its own attention.

Before::                                        After::

    c, r = split(kv, [R, dr], -1)                   dsa.norm_rope_write_latent_cache_fp8(
    ckv = dsa.rms_norm(c, weight, eps)                      kv, weight, eps, cos, sin, True, ue8m0,
    pe = dsa.rope_interleaved(view(r), cos, sin)            cache_fp8, slots)
    dsa.write_latent_cache(ckv, pe, cache, slots)   o = dsa.paged_latent_attention_fp8(
    o = dsa.paged_latent_attention(q, q_pe,                 q, q_pe, cache_fp8, rows, scale)
            cache, rows, scale)

The recipe says in which format. With scales of its own a row is R e4m3 values, an fp32 scale for
every 128 of them, and the rotated key in bf16: 656 bytes instead of 1,152 at the published geometry
(FlashMLA's layout). Under one scale the ops are ``…_fp8_tensor``, which take the scale too, and a
row is R + dr e4m3 values: 576 bytes. The scale is a constant of the compilation
(``CompileConfig.kv_scale``), as checkpoints carry none. From 2^-6 to 448 times the scale a value
keeps its four leading bits; what is larger saturates.

Declines: a latent or rotated key that something else reads too.
"""

import torch

from dsa_compile.facts.formats import E4M3_ROWS, E4M3_TENSOR, kept_in
from dsa_compile.ir.edit import Editor
from dsa_compile.ir.passes import Numerics, RegionPass
from dsa_compile.ir.program import Program
from dsa_compile.ir.region import Region, Role
from dsa_compile.ops.fused_cache import fp8_row_bytes
from dsa_compile.passes.latent_cache import latent_write, rewrite_rows
from dsa_compile.passes.quantized_weights import power_of_two_scales
from dsa_compile.passes.shared import each_layer
from dsa_compile.weights.plan import Constant, WeightEntry

dsa = torch.ops.dsa

SCALE = "self_attn.kv_scale"


class QuantizeLatentCache(RegionPass):
    """Both sides of the latent cache move to FP8 rows."""

    numerics = Numerics.TOLERANCE
    requires = ("insert_paged_caches", "recognize_rms_norm", "recognize_rope_interleaved")
    formats = kept_in(latent_rows=(E4M3_ROWS, E4M3_TENSOR))

    def expects(self, program: Program, region: Region) -> int | None:
        """The latent cache of every layer."""
        return each_layer(program, region)

    def rewrite(self, edit: Editor, program: Program) -> None:
        """Replace every write, and the reads of what it writes."""
        one_scale = program.config.formats.has({"latent_rows": E4M3_TENSOR})
        ue8m0 = power_of_two_scales(program)
        for write in edit.matches(latent_write()):
            rank, rope = write["rank"], write["rope"]
            if not one_scale:
                rewrite_rows(
                    edit,
                    write,
                    fp8_row_bytes(rank, rope),
                    (dsa.norm_rope_write_latent_cache_fp8.default, [ue8m0]),
                    (dsa.paged_latent_attention_fp8.default, []),
                )
                continue
            edit.begin_site()
            value = Constant("float32", (1,), (program.config.kv_scale,))
            program.weights.define(edit.region.kind, SCALE, WeightEntry("float32", (1,), value))
            scale = edit.input(Role.WEIGHT, SCALE, (1,), torch.float32)
            rewrite_rows(
                edit,
                write,
                rank + rope,
                (dsa.norm_rope_write_latent_cache_fp8_tensor.default, [scale]),
                (dsa.paged_latent_attention_fp8_tensor.default, [scale]),
            )
