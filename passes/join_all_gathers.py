"""Bring tokens, weights and choices to the experts of all lanes in one message.

Before::                                    After::

    xs = dsa.all_gather_rows(x, "dp", n)    rows = dsa.all_gather_many([x, w, i], "dp", n)
    ws = dsa.all_gather_rows(w, "dp", n)    xs, ws, is = rows
    is = dsa.all_gather_rows(i, "dp", n)
    y = dsa.experts(xs, ws, is, …)          y = dsa.experts(xs, ws, is, …)

For few rows a message takes as long as its latency, whatever its bytes. In the recipes of FP8 there
are four operands, as e4m3 values travel with their scales.

Declines: rows that are read before all operands are there.
"""

import torch
from torch import fx

from dsa_compile.facts.layout import DP
from dsa_compile.ir.edit import Editor
from dsa_compile.ir.match import argument, calls
from dsa_compile.ir.passes import Numerics, RegionPass
from dsa_compile.ir.program import Program
from dsa_compile.ir.region import Region
from dsa_compile.ops import Family, ops_of
from dsa_compile.passes.shared import each_experts

dsa = torch.ops.dsa


class JoinAllGathers(RegionPass):
    """The all-gathers in front of experts become one."""

    numerics = Numerics.BITWISE
    requires = ("place", "gather_quantized")
    cuts = DP

    def expects(self, program: Program, region: Region) -> int | None:
        """One before the experts of every MoE layer."""
        return each_experts(program, region)

    def rewrite(self, edit: Editor, program: Program) -> None:
        """Join what each call of experts takes."""
        for experts in calls(edit.graph, *ops_of(Family.EXPERTS)):
            gathers = _gathers(experts)
            if len(gathers) < 2:
                continue
            place = {node: number for number, node in enumerate(edit.graph.nodes)}
            operands = [argument(each, "x") for each in gathers]
            first = min((user for each in gathers for user in each.users), key=place.__getitem__)
            late = [node for node in operands if place[node] >= place[first]]
            if late:
                edit.decline(experts, f"{first.name} reads gathered rows before {late[0].name}")
                continue
            axis, ranks = (argument(gathers[0], name) for name in ("axis", "ranks"))
            every = edit.call(dsa.all_gather_many.default, operands, axis, ranks, before=first)
            names = [each.name for each in gathers]
            for old, new in zip(gathers, edit.unpack(every, *names, before=first), strict=True):
                edit.swap(old, new)
            edit.close_site()


def _gathers(experts: fx.Node) -> list[fx.Node]:
    """The all-gathers that reach experts, also through their numbers on a rank, in order."""
    found: dict[fx.Node, None] = {}
    for node in experts.all_input_nodes:
        source = argument(node, "indices") if node.target is dsa.place_experts.default else node
        if source.target is dsa.all_gather_rows.default:
            found[source] = None
    axes = {(argument(node, "axis"), argument(node, "ranks")) for node in found}
    return list(found) if len(axes) == 1 else []
