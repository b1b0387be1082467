"""Cut dense and shared MLPs along their inner dimension.

Before::                                        After, on each of n ranks::

    h = dsa.swiglu(linear(x, gate),                 h = dsa.swiglu(linear(x, gate'),
            linear(x, up))          # [T, I]                linear(x, up'))         # [T, I/n]
    y = linear(h, down)                             y = dsa.all_reduce(linear(h, down'), "tp", n)

A rank has some rows of gate, the same rows of up, and the columns of down that take them.
"""

import torch

from dsa_compile.facts.layout import MLPS
from dsa_compile.ir.edit import Editor
from dsa_compile.ir.match import Call, Node
from dsa_compile.ir.passes import Numerics, RegionPass
from dsa_compile.ir.program import Program
from dsa_compile.ir.region import Region
from dsa_compile.passes.sharding import Cut, all_reduce, compute_part
from dsa_compile.passes.shared import each_layer

dsa = torch.ops.dsa


def _pattern() -> Call:
    x = Node("x")
    gate = Call(dsa.linear.default, x, Node("gate"))
    up = Call(dsa.linear.default, x, Node("up"))
    return Call(dsa.linear.default, Call(dsa.swiglu.default, gate, up), Node("down"))


class ShardMlps(RegionPass):
    """Inner dimensions over ranks, and an all-reduce behind the down projection."""

    numerics = Numerics.TOLERANCE  # the down projection sums by rank
    requires = ("recognize_linear", "recognize_swiglu", "flatten_tokens")
    cuts = MLPS

    def expects(self, program: Program, region: Region) -> int | None:
        """The dense MLP or the shared expert of every layer."""
        return each_layer(program, region)

    def rewrite(self, edit: Editor, program: Program) -> None:
        """Cut every match."""
        for m in edit.matches(_pattern()):
            cuts = [Cut(m["gate"], 0), Cut(m["up"], 0), Cut(m["down"], 1)]
            part = compute_part(edit, program, cuts, m)
            if part is not None:
                all_reduce(edit, program, m.root, part)
