"""Sum over ranks in the norm of the sum.

Before::                                    After::

    y = dsa.all_reduce(x, "tp", n)          n, q, s, h = dsa.all_reduce_add_rms_norm_quantize(
    n, q, s, h = dsa.add_rms_norm_quantize(         x, "tp", n, res, weight, eps, ue8m0)
            y, res, weight, eps, ue8m0)

Where ranks store to each other's memory, one kernel does it all for few rows: what arrives from
other ranks is added while the row is in registers. Elsewhere the two kernels run as before.

Leaves out: widths that only the fallback kernel would take.
"""

import torch

from dsa_compile.facts.formats import E4M3_ROWS, kept_in
from dsa_compile.facts.layout import TP
from dsa_compile.ir.edit import Editor
from dsa_compile.ir.match import Call, Const, Node
from dsa_compile.ir.passes import Numerics, RegionPass
from dsa_compile.ir.program import Program
from dsa_compile.ir.region import Region
from dsa_compile.passes.kernel_choice import loses_kernels
from dsa_compile.passes.shared import each_layer

dsa = torch.ops.dsa

_FUSED = dsa.all_reduce_add_rms_norm_quantize.default


class FuseAllReduceNorm(RegionPass):
    """All-reduce, addition, norm and quantisation become one op."""

    numerics = Numerics.BITWISE
    requires = ("place", "fuse_add_norm_quantize")
    formats = kept_in(activations=E4M3_ROWS)
    cuts = TP

    def expects(self, program: Program, region: Region) -> int | None:
        """The norm between attention and MLP."""
        return each_layer(program, region)

    def rewrite(self, edit: Editor, program: Program) -> None:
        """Replace every match."""
        total = Call(
            dsa.all_reduce.default, Node("x"), Const("axis", str), Const("ranks", int), name="total"
        )
        given = (Node("residual"), Node("weight"), Const("eps", float), Const("ue8m0", bool))
        for m in edit.matches(Call(dsa.add_rms_norm_quantize.default, total, *given)):
            norm = m.root
            args = (m["x"], m["axis"], m["ranks"], *norm.args[1:])
            if reason := loses_kernels(program, _FUSED, args, [norm]):
                edit.leave(m, reason)
                continue
            new = edit.call(_FUSED, *args, before=norm)
            names = ("normed", "q", "scale", "residual")
            for part in list(norm.users):
                index = part.args[1]
                assert isinstance(index, int)
                edit.take(new, index, part, names[index])
            edit.close_site()
