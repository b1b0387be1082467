"""Recognise RMSNorm as the reference writes it.

Before::                                        After::

    h = to.dtype(x, float32)                        y = dsa.rms_norm(x, weight, eps)
    v = mean(pow(h, 2), [-1], keepdim)
    n = to.dtype(mul(h, rsqrt(add(v, eps))), x.dtype)
    y = mul(weight, n)

The epsilon is read from the graph: the norms of the low-rank projections keep 1e-6 whatever the
configuration says.

Declines: a mean over other dimensions, an intermediate that is used elsewhere, a norm that is
rounded to another dtype than the input's before it meets the weight.
"""

import torch

from dsa_compile.ir.edit import Editor
from dsa_compile.ir.match import Call, Cast, Const, Node
from dsa_compile.ir.passes import RegionPass
from dsa_compile.ir.program import Place, Program
from dsa_compile.ir.region import Region
from dsa_compile.passes.shared import each_draft, each_latent, each_layer, in_place

aten, dsa = torch.ops.aten, torch.ops.dsa


def _pattern() -> Call:
    x = Cast(Node("x"))
    variance = Call(aten.mean.dim, Call(aten.pow.Tensor_Scalar, x, 2), [-1], True)
    scale = Call(aten.rsqrt.default, Call(aten.add.Tensor, variance, Const("eps", float)))
    normed = Call(aten.mul.Tensor, x, scale, commutes=True)
    return Call(aten.mul.Tensor, Node("weight"), Cast(normed, rounds=True), commutes=True)


class RecognizeRmsNorm(RegionPass):
    """Square, mean, rsqrt and two products become ``dsa.rms_norm``."""

    requires = ("strip_noise",)

    def expects(self, program: Program, region: Region) -> int | None:
        """Two around the sublayers, one inside each low-rank projection; one before the head."""
        others = in_place(program, region, Place.HEAD) + each_draft(program, region, 3)
        low_ranks = bool(program.spec.q_lora_rank) + each_latent(program, region)
        return each_layer(program, region, 2 + low_ranks) + others

    def rewrite(self, edit: Editor, program: Program) -> None:
        """Replace every match."""
        for m in edit.matches(_pattern()):
            (normed,) = (node for node in m.root.all_input_nodes if node is not m["weight"])
            rounded, dtype = (node.meta["val"].dtype for node in (normed, m["x"]))
            if rounded != dtype:
                edit.decline(m, f"multiplies the weight by {rounded}, the input is {dtype}")
                continue
            norm = edit.call(dsa.rms_norm.default, m["x"], m["weight"], m["eps"], before=m.root)
            edit.replace(m.root, norm)
