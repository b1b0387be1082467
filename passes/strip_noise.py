"""Erase what export leaves behind and no computation needs.

Before::                                After::

    y = to.dtype(x_f32, float32)            (x)
    y = to.dtype_layout(x, dtype=bool, …)   (x)  or  to.dtype(x, bool)
    y = slice(x, dim, 0, INT64_MAX)         (x)

Declines: conversions that change the dtype (they become the plain ``to.dtype``), strided slices.
"""

import torch

from dsa_compile.ir.edit import Editor
from dsa_compile.ir.match import argument, calls
from dsa_compile.ir.passes import RegionPass
from dsa_compile.ir.program import Program

aten = torch.ops.aten

_CONVERSIONS = (aten.to.dtype, aten.to.dtype_layout, aten.to.device, aten._to_copy.default)
_END = 2**63 - 1


class StripNoise(RegionPass):
    """Drop conversions to the same dtype and slices of everything."""

    def rewrite(self, edit: Editor, program: Program) -> None:
        """One sweep over the region."""
        for node in calls(edit.graph, *_CONVERSIONS):
            source = node.args[0]
            assert isinstance(source, torch.fx.Node)
            if node.meta["val"].dtype == source.meta["val"].dtype:
                edit.replace(node, source)
            elif node.target is not aten.to.dtype:
                dtype = node.meta["val"].dtype
                edit.replace(node, edit.call(aten.to.dtype, source, dtype, before=node))
        for node in calls(edit.graph, aten.slice.Tensor):
            source = node.args[0]
            assert isinstance(source, torch.fx.Node)
            whole = argument(node, "start") in (0, None) and argument(node, "end") in (_END, None)
            if whole and argument(node, "step") == 1:
                edit.replace(node, source)
