"""Quantise in the gated activation whose result is quantised.

Before::                                    After::

    y = dsa.swiglu_packed(gate_up)          q, s = dsa.swiglu_packed_quantize(gate_up, ue8m0)
    q, s = dsa.quantize_blocks(y, ue8m0)

The fused op multiplies in fp32 and rounds once, where the activation alone rounds ``silu(gate)``
before the product too.

Declines: an activation that something else reads as well.
"""

import torch

from dsa_compile.facts.formats import E4M3_ROWS, kept_in
from dsa_compile.ir.edit import Editor
from dsa_compile.ir.match import Call, Const, Node
from dsa_compile.ir.passes import Numerics, RegionPass
from dsa_compile.ir.program import Program
from dsa_compile.ir.region import Region
from dsa_compile.passes.shared import gated_mlps

dsa = torch.ops.dsa


class FuseSwigluQuantize(RegionPass):
    """Activation and quantisation become one op."""

    numerics = Numerics.TOLERANCE
    requires = ("pack_swiglu", "quantize_projections")
    formats = kept_in(activations=E4M3_ROWS)

    def expects(self, program: Program, region: Region) -> int | None:
        """The dense MLP, or the shared expert where it is not one of the grouped ones."""
        return gated_mlps(program, region)

    def rewrite(self, edit: Editor, program: Program) -> None:
        """Replace every match."""
        activation = Call(dsa.swiglu_packed.default, Node("gate_up"), name="activation")
        pattern = Call(dsa.quantize_blocks.default, activation, Const("ue8m0", bool))
        for m in edit.matches(pattern):
            args = (m["gate_up"], m["ue8m0"])
            at = m["activation"]
            new = edit.call(dsa.swiglu_packed_quantize.default, *args, before=at)
            edit.replace(m.root, new)
