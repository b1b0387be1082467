"""Cut the head by rows of the vocabulary: each rank makes some of the logits, and all get them all.

Before::                                        After, on each of n ranks::

    logits = linear(x, lm_head)     # [N, V]        part = linear(x, lm_head')      # [N, V/n]
                                                    logits = dsa.all_gather(part, "tp", n)

Every rank has all logits in the end, and so all of them choose the same tokens.
"""

import torch

from dsa_compile.facts.layout import HEAD
from dsa_compile.ir.edit import Editor
from dsa_compile.ir.match import ANY, Call, Node
from dsa_compile.ir.passes import Numerics, RegionPass
from dsa_compile.ir.program import Place, Program
from dsa_compile.ir.region import Region
from dsa_compile.passes.sharding import Cut, all_gather, compute_part
from dsa_compile.passes.shared import in_place

dsa = torch.ops.dsa


class ShardHead(RegionPass):
    """The vocabulary over ranks, and an all-gather behind the head."""

    numerics = Numerics.TOLERANCE  # a narrower GEMM may sum in another order
    requires = ("recognize_linear", "flatten_tokens")
    cuts = HEAD

    def expects(self, program: Program, region: Region) -> int | None:
        """The one projection of the head."""
        return in_place(program, region, Place.HEAD)

    def rewrite(self, edit: Editor, program: Program) -> None:
        """Cut the head's projection."""
        if program.place(edit.region) is not Place.HEAD:
            return
        for m in edit.matches(Call(dsa.linear.default, ANY, Node("weight"))):
            part = compute_part(edit, program, [Cut(m["weight"], 0)], m)
            if part is not None:
                all_gather(edit, program, m.root, part)
