"""Share out the routed experts over ranks: a part of each, or whole ones.

Before::                                        After, whole experts on each of n ranks::

    y = dsa.experts(x, w, i, gate_up, down)         own = dsa.place_experts(i, places)
                                                    p = dsa.experts(x, w, own, gate_up', down')
                                                    y = dsa.all_reduce(p, "tp", n)

Every rank routes the tokens that it has. ``places`` is a weight: for each expert its number on
this rank, or -1, which weighs nothing; other places are other data, and no other graph. Without
``ep`` a rank has an equal part of every expert's inner dimension instead, as of other MLPs.

Lanes have tokens of their own, and share the experts. With ``dp`` of d lanes, each of n ranks::

                                                xs = dsa.all_gather_rows(x, "dp", d)    # [d * T, H]
                                                ws, is = …                    # likewise of w and i
                                                own = dsa.place_experts(is, places)
                                                ps = dsa.experts(xs, ws, own, gate_up', down')
                                                p = dsa.reduce_scatter(ps, "dp", d)     # [T, H]
                                                y = dsa.all_reduce(p, "tp", n)

T is the same on all lanes: a step is padded to the longest one's.
"""

import torch
from torch import fx

from dsa_compile.facts.layout import DP, EXPERTS
from dsa_compile.ir.edit import Editor
from dsa_compile.ir.match import Call, Node
from dsa_compile.ir.passes import Numerics, RegionPass
from dsa_compile.ir.program import Program
from dsa_compile.ir.region import Region, Role
from dsa_compile.passes.sharding import Cut, all_reduce, compute_part
from dsa_compile.passes.shared import each_experts
from dsa_compile.weights.plan import Constant, Shard, WeightEntry

dsa = torch.ops.dsa

PLACES = "mlp.experts.places"


class ShardExperts(RegionPass):
    """Routed experts over all ranks, and what brings tokens to them and sums back."""

    numerics = Numerics.TOLERANCE  # experts are summed by rank
    requires = ("recognize_experts", "flatten_tokens")
    cuts = EXPERTS

    def expects(self, program: Program, region: Region) -> int | None:
        """The experts of every MoE layer."""
        return each_experts(program, region)

    def rewrite(self, edit: Editor, program: Program) -> None:
        """Cut every call."""
        layout = program.config.layout
        axis, whole = layout.experts_axis, layout.ep > 1
        operands = (Node(name) for name in ("x", "weights", "indices", "gate_up", "down"))
        for m in edit.matches(Call(dsa.experts.default, *operands)):
            if whole:
                cuts = [Cut(m["gate_up"], 0, axis=axis), Cut(m["down"], 0, axis=axis)]
            else:
                cuts = [Cut(m["gate_up"], 1, stacked=2, axis=axis), Cut(m["down"], 2, axis=axis)]
            count = m["gate_up"].meta["val"].shape[0]
            part = compute_part(edit, program, cuts, m)
            if part is None:
                continue
            if layout.dp > 1:
                part = _with_lanes(edit, part, layout.dp)
            if whole:
                part = self._placed(edit, program, part, count)
            if layout.dp > 1:
                args = (part, DP, layout.dp)
                part = edit.call(dsa.reduce_scatter.default, *args, before=m.root)
            all_reduce(edit, program, m.root, part)

    def _placed(self, edit: Editor, program: Program, part: fx.Node, count: int) -> fx.Node:
        """Call of the experts with the numbers that they have on this rank."""
        layout = program.config.layout
        own = count // layout.ep
        values = tuple(
            expert - rank * own if expert // own == rank else -1
            for rank in range(layout.ep)
            for expert in range(count)
        )
        every = Constant("int64", (layout.ep * count,), values)
        shard = Shard(layout.experts_axis, layout.ep, 0, count, every)
        entry = WeightEntry("int64", (count,), shard)
        program.weights.define(edit.region.kind, PLACES, entry)
        places = edit.input(Role.WEIGHT, PLACES, (count,), torch.int64)
        x, weights, indices, *matrices = part.args
        numbers = edit.call(dsa.place_experts.default, indices, places, before=part)
        args = (x, weights, numbers, *matrices)
        return edit.call(dsa.experts.default, *args, before=part, name=part.name)


def _with_lanes(edit: Editor, part: fx.Node, lanes: int) -> fx.Node:
    """Call of the experts with the tokens of all lanes."""
    rows = [
        edit.call(dsa.all_gather_rows.default, own, DP, lanes, before=part, name=f"all_{own.name}")
        for own in part.args[:3]
        if isinstance(own, fx.Node)
    ]
    args = (*rows, *part.args[3:])
    return edit.call(dsa.experts.default, *args, before=part, name=part.name)
