"""Quantise in the norm of a sum whose result is quantised.

Before::                                        After::

    n, h = dsa.add_rms_norm(x, res, weight,     n, q, s, h = dsa.add_rms_norm_quantize(
            eps)                                        x, res, weight, eps, ue8m0)
    q, s = dsa.quantize_blocks(n, ue8m0)

The fused op normalises the sum before it is rounded to the model's dtype, and rounds once.

Declines: summands and a weight that are not of one dtype.
"""

import torch
from torch import fx

from dsa_compile.facts.formats import E4M3_ROWS, kept_in
from dsa_compile.ir.edit import Editor
from dsa_compile.ir.match import Call, Const, Node, calls, getitem
from dsa_compile.ir.passes import Numerics, RegionPass
from dsa_compile.ir.program import Program
from dsa_compile.ir.region import Region
from dsa_compile.passes.fuse_norm_quantize import take_quantized
from dsa_compile.passes.shared import each_layer, gated_mlps
from dsa_compile.weights.dtypes import dtype_name

dsa = torch.ops.dsa


def sum_not_fusable(pair: fx.Node) -> str | None:
    """Reason why an ``add_rms_norm`` cannot quantise as well."""
    dtypes = {dtype_name(node.meta["val"].dtype) for node in pair.all_input_nodes}
    if len(dtypes) == 1:
        return None
    return f"adds and scales tensors that differ in dtype: {sorted(dtypes)}"


def fuse_add_norm(edit: Editor, pair: fx.Node, quantize: fx.Node) -> None:
    """Let one op stand for an ``add_rms_norm`` and the quantisation of its first result."""
    args = (*pair.args, quantize.args[1])
    new = edit.call(dsa.add_rms_norm_quantize.default, *args, before=pair)
    take_quantized(edit, new, 1, quantize)
    for part in list(pair.users):
        index, name = {0: (0, "normed"), 1: (3, "residual")}[part.args[1]]  # type: ignore[index]
        edit.take(new, index, part, name)
    edit.close_site()


class FuseAddNormQuantize(RegionPass):
    """Addition, norm and quantisation become one op."""

    numerics = Numerics.TOLERANCE
    requires = ("fuse_add_norm", "quantize_projections")
    formats = kept_in(activations=E4M3_ROWS)

    def expects(self, program: Program, region: Region) -> int | None:
        """The norm between attention and MLP, unless experts in bf16 alone read it."""
        wide = any(calls(region.graph, dsa.experts.default)) and not gated_mlps(program, region)
        return each_layer(program, region, 0 if wide else 1)

    def rewrite(self, edit: Editor, program: Program) -> None:
        """Replace every match."""
        pair = Call(
            dsa.add_rms_norm.default,
            *(Node("x"), Node("residual"), Node("weight"), Const("eps", float)),
            name="pair",
            shared=True,
        )
        normed = getitem(pair, 0, shared=True)
        for m in edit.matches(Call(dsa.quantize_blocks.default, normed, Const("ue8m0", bool))):
            if reason := sum_not_fusable(m["pair"]):
                edit.decline(m["pair"], reason, 3)
            else:
                fuse_add_norm(edit, m["pair"], m.root)
