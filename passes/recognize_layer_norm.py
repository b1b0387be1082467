"""Recognise the indexer's LayerNorm over its last dimension.

Before::                                        After::

    y = layer_norm(x, [D], weight, bias, eps)       y = dsa.layer_norm(x, weight, bias, eps)

Declines: a norm without weight or bias, or over several dimensions.
"""

import torch

from dsa_compile.ir.edit import Editor
from dsa_compile.ir.match import ANY, Call, Const, Node
from dsa_compile.ir.passes import RegionPass
from dsa_compile.ir.program import Program
from dsa_compile.ir.region import Region
from dsa_compile.passes.shared import each_indexer

aten, dsa = torch.ops.aten, torch.ops.dsa


class RecognizeLayerNorm(RegionPass):
    """``aten.layer_norm`` becomes ``dsa.layer_norm``."""

    requires = ("strip_noise",)

    def expects(self, program: Program, region: Region) -> int | None:
        """The norm of the indexer's keys, and that of its queries where no low rank has one."""
        return each_indexer(program, region, 1 if program.spec.q_lora_rank else 2)

    def rewrite(self, edit: Editor, program: Program) -> None:
        """Replace every match."""
        pattern = Call(
            aten.layer_norm.default, Node("x"), [ANY], Node("weight"), Node("bias"),
            Const("eps", float), ANY,
        )  # fmt: skip
        for m in edit.matches(pattern):
            args = (m["x"], m["weight"], m["bias"], m["eps"])
            edit.replace(m.root, edit.call(dsa.layer_norm.default, *args, before=m.root))
