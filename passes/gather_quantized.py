"""Quantise tokens before the ranks of other lanes get them.

Before::                                    After::

    xs = dsa.all_gather_rows(x, "dp", n)    q, s = dsa.quantize_blocks(x, ue8m0)
    q, s = dsa.quantize_blocks(xs, ue8m0)   qs = dsa.all_gather_rows(q, "dp", n)
                                            ss = dsa.all_gather_rows(s, "dp", n)

A row in e4m3 with a scale for every 128 values is about half as many bytes as in bf16. Each row is
quantised by itself, so the results have the same bits; a lane quantises its own rows alone, and
the shared expert, which takes the same rows, takes the same values.

Declines: gathered rows that something else reads too.
"""

import torch

from dsa_compile.facts.config import FP8_RECIPES
from dsa_compile.facts.layout import DP
from dsa_compile.ir.edit import Editor
from dsa_compile.ir.match import Call, Const, Node
from dsa_compile.ir.passes import Numerics, RegionPass
from dsa_compile.ir.program import Program
from dsa_compile.ir.region import Region
from dsa_compile.passes.shared import each_experts

dsa = torch.ops.dsa


class GatherQuantized(RegionPass):
    """All-gathers take e4m3 values and scales in place of bf16."""

    numerics = Numerics.BITWISE
    requires = ("place", "quantize_experts")
    recipes = FP8_RECIPES
    cuts = DP

    def expects(self, program: Program, region: Region) -> int | None:
        """The tokens of the experts of every MoE layer."""
        return each_experts(program, region)

    def rewrite(self, edit: Editor, program: Program) -> None:
        """Exchange the two calls of every match."""
        rows = Call(
            dsa.all_gather_rows.default,
            *(Node("x"), Const("axis", str), Const("ranks", int)),
            name="rows",
        )
        for m in edit.matches(Call(dsa.quantize_blocks.default, rows, Const("ue8m0", bool))):
            before = m["rows"]
            pair = edit.call(dsa.quantize_blocks.default, m["x"], m["ue8m0"], before=before)
            own = edit.unpack(pair, "q", "scale", before=before)
            gathered = [
                edit.call(
                    dsa.all_gather_rows.default,
                    *(part, m["axis"], m["ranks"]),
                    before=before,
                    name=f"all_{part.name}",
                )
                for part in own
            ]
            for part in list(m.root.users):
                index = part.args[1]
                assert isinstance(index, int)
                edit.swap(part, gathered[index])
            edit.close_site()
        edit.merge_duplicates()
