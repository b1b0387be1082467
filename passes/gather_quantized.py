"""Quantise tokens before the ranks of other lanes get them.

Before::                                            After::

    xs, … = dsa.all_gather_many([x, …], "dp", n)        q, s = dsa.quantize_blocks(x, ue8m0)
    q, s = dsa.quantize_blocks(xs, ue8m0)               qs, ss, … = dsa.all_gather_many(
                                                                [q, s, …], "dp", n)

A row in e4m3 with a scale for every 128 values is about half as many bytes as in bf16. Each row is
quantised by itself, so the results have the same bits; a lane quantises its own rows alone, and
the shared expert, which takes the same rows, takes the same values.

Declines: gathered rows that something else reads too.
"""

import operator

import torch

from dsa_compile.facts.formats import E4M3_ROWS, kept_in
from dsa_compile.facts.layout import DP
from dsa_compile.ir.edit import Editor
from dsa_compile.ir.match import ANY, Call, Const, argument
from dsa_compile.ir.passes import Numerics, RegionPass
from dsa_compile.ir.program import Program
from dsa_compile.ir.region import Region
from dsa_compile.passes.shared import each_experts

dsa = torch.ops.dsa


class GatherQuantized(RegionPass):
    """All-gathers take e4m3 values and scales in place of bf16."""

    numerics = Numerics.BITWISE
    requires = ("place", "quantize_experts")
    formats = kept_in(activations=E4M3_ROWS)
    cuts = DP

    def expects(self, program: Program, region: Region) -> int | None:
        """The tokens of the experts of every MoE layer."""
        return each_experts(program, region)

    def rewrite(self, edit: Editor, program: Program) -> None:
        """Exchange the two calls of every match."""
        every = Call(
            dsa.all_gather_many.default,
            *(ANY, Const("axis", str), Const("ranks", int)),
            name="every",
            shared=True,
        )
        rows = Call(operator.getitem, every, Const("index", int))
        for m in edit.matches(Call(dsa.quantize_blocks.default, rows, Const("ue8m0", bool))):
            before, index, operands = m["every"], m["index"], argument(m["every"], "xs")
            given = operands[index], m["ue8m0"]
            pair = edit.call(dsa.quantize_blocks.default, *given, before=before)
            own = [*operands]
            own[index : index + 1] = edit.unpack(pair, "q", "scale", before=before)
            many = edit.call(dsa.all_gather_many.default, own, m["axis"], m["ranks"], before=before)
            names = [f"all_{part.name}" for part in own]
            gathered = edit.unpack(many, *names, before=before)
            for user in [*before.users, *m.root.users]:
                at = int(user.args[1])
                if user not in m.interior:
                    past = index if user in m.root.users else at > index
                    edit.swap(user, gathered[at + past])
            edit.close_site()
        edit.merge_duplicates()
