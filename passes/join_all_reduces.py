"""Add first and reduce once where two sums over ranks are added.

Before::                                        After::

    y = add(all_reduce(a), all_reduce(b))           y = all_reduce(add(a, b))

An MoE layer so exchanges what its routed and its shared expert give in one message.
"""

import torch

from dsa_compile.facts.layout import MLPS
from dsa_compile.ir.edit import Editor
from dsa_compile.ir.match import Call, Const, Node
from dsa_compile.ir.passes import Numerics, RegionPass
from dsa_compile.ir.program import Program
from dsa_compile.ir.region import Region
from dsa_compile.passes.shared import each_experts

aten, dsa = torch.ops.aten, torch.ops.dsa


class JoinAllReduces(RegionPass):
    """Two all-reduces and an addition become an addition and one all-reduce."""

    numerics = Numerics.TOLERANCE  # sums run in another order
    requires = ("shard_mlps", "shard_experts")
    cuts = MLPS

    def expects(self, program: Program, region: Region) -> int | None:
        """The routed and the shared expert of every MoE layer."""
        return each_experts(program, region)

    def rewrite(self, edit: Editor, program: Program) -> None:
        """Join every match."""
        axis, ranks = Const("axis", str), Const("ranks", int)
        sums = (Call(dsa.all_reduce.default, Node(name), axis, ranks) for name in ("a", "b"))
        for m in edit.matches(Call(aten.add.Tensor, *sums)):
            part = edit.call(aten.add.Tensor, m["a"], m["b"], before=m.root, name=m.root.name)
            total = edit.call(dsa.all_reduce.default, part, m["axis"], m["ranks"], before=m.root)
            edit.replace(m.root, total)
