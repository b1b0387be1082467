"""One op for the indexer's head weights.

Before::                                    After::

    h = dsa.linear(to(x, f32), w)           y = dsa.index_head_weights(x, w, scale)
    y = mul(h, scale)

``w`` is fp32 in every recipe, and so is the product: rounding it changes which keys are chosen.

Declines: products in another dtype, which no constant scales, or that are read elsewhere too.
"""

import torch

from dsa_compile.ir.edit import Editor
from dsa_compile.ir.match import Call, Cast, Const, Node
from dsa_compile.ir.passes import RegionPass
from dsa_compile.ir.program import Program
from dsa_compile.ir.region import Region
from dsa_compile.ir.tensor_info import describe
from dsa_compile.passes.shared import each_indexer

aten, dsa = torch.ops.aten, torch.ops.dsa


class FuseIndexWeights(RegionPass):
    """Conversion, product and scale become ``dsa.index_head_weights``."""

    requires = ("recognize_linear", "flatten_tokens")

    def expects(self, program: Program, region: Region) -> int | None:
        """The indexer of every layer."""
        return each_indexer(program, region)

    def rewrite(self, edit: Editor, program: Program) -> None:
        """Replace every match."""
        product = Call(dsa.linear.default, Cast(Node("x")), Node("weight"), name="product")
        for m in edit.matches(Call(aten.mul.Tensor, product, Const("scale"))):
            dtypes = {m[name].meta["val"].dtype for name in ("weight", "product")}
            if dtypes != {torch.float32}:
                at = m["product"]
                reason = f"gives {describe(at.meta['val'])!r}"
                edit.decline(at, reason, 2)
                continue
            args = (m["x"], m["weight"], float(m["scale"]))
            new = edit.call(dsa.index_head_weights.default, *args, before=m.root)
            edit.replace(m.root, new)
