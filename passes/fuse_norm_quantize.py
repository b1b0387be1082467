"""Quantise in the norm whose result is quantised.

Before::                                    After::

    n = dsa.rms_norm(x, weight, eps)        q, s = dsa.rms_norm_quantize(x, weight, eps, ue8m0)
    q, s = dsa.quantize_blocks(n, ue8m0)

Where something else reads ``n`` too it is ``n, q, s = dsa.rms_norm_quantize_keep(…)``. The fused op
rounds once, after the product with the weight, where the norm alone rounds before it as well.

Declines: a norm whose weight promotes its result to another dtype than that of ``x``.
"""

import torch
from torch import fx

from dsa_compile.facts.formats import E4M3_ROWS, kept_in
from dsa_compile.ir.edit import Editor
from dsa_compile.ir.match import Call, Const, Node
from dsa_compile.ir.passes import Numerics, RegionPass
from dsa_compile.ir.program import Program
from dsa_compile.ir.region import Region
from dsa_compile.ir.tensor_info import describe
from dsa_compile.passes.shared import each_layer

dsa = torch.ops.dsa


def norm_not_fusable(norm: fx.Node) -> str | None:
    """Reason why a ``rms_norm`` cannot quantise as well: its result has not its input's type."""
    x, normed = norm.all_input_nodes[0].meta["val"], norm.meta["val"]
    return None if x.dtype is normed.dtype else f"makes {describe(normed)!r} of {describe(x)!r}"


def fuse_norm(edit: Editor, norm: fx.Node, quantize: fx.Node) -> None:
    """Let one op stand for a ``rms_norm`` and the quantisation of its result."""
    args = (*norm.args, quantize.args[1])
    if set(norm.users) == {quantize}:
        new = edit.call(dsa.rms_norm_quantize.default, *args, before=norm)
        take_quantized(edit, new, 0, quantize)
    else:
        new = edit.call(dsa.rms_norm_quantize_keep.default, *args, before=norm)
        take_quantized(edit, new, 1, quantize)
        edit.take(new, 0, norm, "normed")
    edit.close_site()


def take_quantized(edit: Editor, several: fx.Node, first: int, quantize: fx.Node) -> None:
    """Let results ``first`` and ``first + 1`` stand for the values and scales of a quantisation."""
    for part in list(quantize.users):
        index = part.args[1]
        assert isinstance(index, int)
        edit.take(several, first + index, part, ("q", "scale")[index])


class FuseNormQuantize(RegionPass):
    """Norm and quantisation become one op."""

    numerics = Numerics.TOLERANCE
    requires = ("recognize_rms_norm", "quantize_projections")
    formats = kept_in(activations=E4M3_ROWS)

    def expects(self, program: Program, region: Region) -> int | None:
        """The norm of the queries' low rank; a layer's opening norm too where it is not moved."""
        return each_layer(program, region)

    def rewrite(self, edit: Editor, program: Program) -> None:
        """Replace every match."""
        norm = Call(
            dsa.rms_norm.default,
            *(Node("x"), Node("weight"), Const("eps", float)),
            name="norm",
            shared=True,
        )
        for m in edit.matches(Call(dsa.quantize_blocks.default, norm, Const("ue8m0", bool))):
            if reason := norm_not_fusable(m["norm"]):
                edit.decline(m["norm"], reason, 2)
            else:
                fuse_norm(edit, m["norm"], m.root)
