"""Quantise in the product that brings attention's result back to heads.

Before::                                            After::

    o = dsa.expand_output(o_latent, w_uv)           q, s = dsa.expand_output_quantize(
    q, s = dsa.quantize_blocks(                             o_latent, w_uv, ue8m0)
            reshape(o, [-1, H * dv]), ue8m0)

A head whose values are whole blocks of the scales can be quantised where it is made.

Declines: heads that are not, and results that something else reads as well.
"""

import torch

from dsa_compile.facts.formats import E4M3_ROWS, kept_in
from dsa_compile.ir.edit import Editor
from dsa_compile.ir.match import ANY, Call, Const, Node
from dsa_compile.ir.passes import RegionPass
from dsa_compile.ir.program import Program
from dsa_compile.ir.region import Region
from dsa_compile.ops.quantize import BLOCK
from dsa_compile.passes.shared import each_layer

aten, dsa = torch.ops.aten, torch.ops.dsa


class FuseExpandQuantize(RegionPass):
    """Product and quantisation become ``dsa.expand_output_quantize``."""

    requires = ("absorb_mla", "quantize_projections")
    formats = kept_in(activations=E4M3_ROWS)

    def expects(self, program: Program, region: Region) -> int | None:
        """Attention's result in every layer, if its heads are whole blocks."""
        return each_layer(program, region, 0 if program.spec.v_head_dim % BLOCK else 1)

    def rewrite(self, edit: Editor, program: Program) -> None:
        """Replace every match."""
        heads = Call(dsa.expand_output.default, Node("o_latent"), Node("w_uv"))
        flat = Call(aten.reshape.default, heads, ANY)
        for m in edit.matches(Call(dsa.quantize_blocks.default, flat, Const("ue8m0", bool))):
            width = int(m["w_uv"].meta["val"].shape[1])
            if width % BLOCK:
                reason = f"quantises heads of {width} values, not whole blocks of {BLOCK}"
                edit.decline(m, reason)
                continue
            args = (m["o_latent"], m["w_uv"], m["ue8m0"])
            new = edit.call(dsa.expand_output_quantize.default, *args, before=m.root)
            edit.replace(m.root, new)
