"""Attention to FP8 rows goes on to its heads and their quantisation.

Before::                                            After::

    o = dsa.paged_latent_attention_fp8(                 q, s = dsa.
            ql, qp, cache, rows, scale)                     paged_latent_attention_fp8_expand(
    q, s = dsa.expand_output_quantize(                      ql, qp, cache, rows, scale,
            o, w_uv, ue8m0)                                 w_uv, ue8m0)

Several blocks attend to each token where tokens are few; the kernel that puts their parts together
has a head's values at hand, and its matrix can be on the way before they are. Attention to rows
under one scale is rewritten likewise.

Declines: a result that something else reads as well. Left alone where no kernel but the fallback
does both, as on Blackwell and with heads of 256: there each op keeps the kernel that is best for
it.
"""

import torch
from torch._ops import OpOverload

from dsa_compile.facts.formats import E4M3_ROWS, kept_in
from dsa_compile.ir.edit import Editor
from dsa_compile.ir.match import Call, Const, Node
from dsa_compile.ir.passes import RegionPass
from dsa_compile.ir.program import Program
from dsa_compile.ir.region import Region
from dsa_compile.ops.quantize import BLOCK
from dsa_compile.passes.kernel_choice import loses_kernels
from dsa_compile.passes.shared import each_layer

dsa = torch.ops.dsa

_FUSED = {
    dsa.paged_latent_attention_fp8.default: dsa.paged_latent_attention_fp8_expand.default,
    dsa.paged_latent_attention_fp8_tensor.default: (
        dsa.paged_latent_attention_fp8_tensor_expand.default
    ),
}


def _pattern(attention: OpOverload) -> Call:
    """Operands are bound by their names in the schema, which are those of the fused op."""
    operands = (
        Const(a.name, float) if isinstance(a.type, torch.FloatType) else Node(a.name)
        for a in attention._schema.arguments
    )
    expand = dsa.expand_output_quantize.default
    latent = Call(attention, *operands, name="attention")
    return Call(expand, latent, Node("w_uv"), Const("ue8m0", bool))


class FuseAttentionExpand(RegionPass):
    """Attention, product and quantisation become one op."""

    requires = ("quantize_latent_cache", "fuse_expand_quantize")
    formats = kept_in(activations=E4M3_ROWS)

    def expects(self, program: Program, region: Region) -> int | None:
        """Attention in every layer, if its heads are whole blocks."""
        return each_layer(program, region, 0 if program.spec.v_head_dim % BLOCK else 1)

    def rewrite(self, edit: Editor, program: Program) -> None:
        """Replace every match."""
        for attention, fused in _FUSED.items():
            for m in edit.matches(_pattern(attention)):
                args = [m[argument.name] for argument in fused._schema.arguments]
                reason = loses_kernels(program, fused, args, (m["attention"], m.root))
                if reason:
                    edit.leave(m, reason)
                else:
                    edit.replace(m.root, edit.call(fused, *args, before=m.root))
