"""Place a model on ranks: cut weights, and insert the collectives that follow.

Before::                                    After, on each of n ranks::

    h = dsa.swiglu(linear(x, gate),             h = dsa.swiglu(linear(x, gate'),
            linear(x, up))      # [T, I]                linear(x, up'))         # [T, I/n]
    y = linear(h, down)                         y = dsa.all_reduce(linear(h, down'), "tp", n)

    y = dsa.experts(x, w, i, gate_up, down)     own = dsa.place_experts(i, places)
                                                p = dsa.experts(x, w, own, gate_up', down')
                                                y = dsa.all_reduce(p, "tp", n)

The table of :mod:`dsa_compile.facts.placements` says of which weights a rank has a part. The rest
is inferred, value by value along each axis: a weight that meets a part is cut to fit it, as
``down`` above; views get a rank's sizes; and a value that is to be alike on all ranks, or its
lane's own, and is not, becomes so by a collective behind it. Partial sums are added before they
travel: an MoE layer exchanges its routed and its shared experts' in one message.

Every rank routes the tokens that it has. ``places`` is a weight: for each expert its number on
this rank, or -1, which weighs nothing; other places are other data, and no other graph. Lanes share
the experts: ``x``, ``w`` and ``i`` are gathered from all of them in one message, which for few rows
takes as long as its latency, whatever its bytes, and a reduce-scatter gives each the sums of its
own tokens. T is the same on all lanes: a step is padded to the longest one's.

Declines: values that no collective makes whole.
"""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import fx

from dsa_compile.facts.layout import DP, TP, WORLD
from dsa_compile.facts.placements import (
    GIVEN,
    REPLICATE,
    Split,
    Table,
    WeightRow,
    weight_rows,
)
from dsa_compile.ir.edit import Editor
from dsa_compile.ir.match import argument, calls
from dsa_compile.ir.passes import Numerics, RegionPass
from dsa_compile.ir.placement import CONVERSIONS, WrongUse, made_from
from dsa_compile.ir.placement_check import wrong_uses
from dsa_compile.ir.program import Program
from dsa_compile.ir.region import Region, Role
from dsa_compile.ops import ALL_GATHER_MANY, PLACE_EXPERTS
from dsa_compile.weights.plan import Constant, Shard, WeightEntry
from dsa_compile.weights.ranks import shards

aten, dsa = torch.ops.aten, torch.ops.dsa

Cut: TypeAlias = tuple[str, Split]
"""What ranks hold of a weight: an axis, over whose ranks it lies, and a placement along it."""

PLACES = "mlp.experts.places"
_VIEWS = (aten.view.default, aten.reshape.default)


class Place(RegionPass):
    """Weights become a rank's, and what comes of them is made whole by collectives."""

    numerics = Numerics.TOLERANCE  # sums run by rank
    requires = (
        "absorb_mla",
        "flatten_tokens",
        "insert_paged_caches",
        "recognize_embedding",
        "recognize_experts",
        "recognize_linear",
        "recognize_swiglu",
    )
    cuts = WORLD

    def expects(self, program: Program, region: Region) -> int | None:
        """A site for each part of a model that the table names and the region has."""
        return len({row.part for row, _ in _seeds(program, region)})

    def rewrite(self, edit: Editor, program: Program) -> None:
        """Place a region's values."""
        inferred = _Inferred(program, edit.region)
        try:
            inferred.run()
        except _CannotPlaceError as reason:
            edit.decline(reason.node, str(reason))
            return
        for nodes in inferred.sites():
            _Site(edit, program, inferred).make(nodes)


class _CannotPlaceError(Exception):
    """No collective brings a value to the placement that a call takes."""

    def __init__(self, node: fx.Node, reason: object) -> None:
        super().__init__(str(reason))
        self.node = node


def _seeds(program: Program, region: Region) -> list[tuple[WeightRow, fx.Node]]:
    """Operands that rows of the table name, in a region that is not placed yet."""
    entries = program.weights.entries(region.kind)
    if any(any(shards(entry.expr)) for entry in entries.values()):
        return []
    return [
        (row, argument(call, row.operand))
        for row in weight_rows(program.config.layout)
        if row.place in ("", program.place(region).value)
        for call in calls(region.graph, getattr(dsa, row.op).default)
    ]


@dataclass
class _Inferred:
    """Placements of a region's values, and what has to be done for them.

    Attributes:
        cuts: weights that ranks have a part of.
        values: the placement of every value, by axis.
        steps: by a call and an operand of it, what brings that operand to where the call takes it:
            ops, each with its axis. The output stands for what takes the results.
    """

    program: Program
    region: Region
    cuts: dict[fx.Node, Cut] = field(default_factory=dict)
    values: dict[str, dict[fx.Node, Any]] = field(default_factory=dict)
    steps: dict[fx.Node, dict[fx.Node, list[tuple[Any, str]]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(list))
    )

    def run(self) -> None:
        """Infer along every axis.

        Raises:
            _CannotPlaceError: see there.
        """
        for row, operand in _seeds(self.program, self.region):
            self._ask(operand, (row.axis, row.placement))
        layout = self.program.config.layout
        for axis in (DP, TP):
            if layout.along(axis) > 1 and self.cuts:
                while not self._along(axis):
                    pass

    def _along(self, axis: str) -> bool:
        """Infer along an axis; False if more weights had to be cut for it, which begins anew."""
        known: dict[fx.Node, Any] = {
            weight: Split(cut.dim, cut.pieces)
            for weight, (over, cut) in self.cuts.items()
            if over in (axis, WORLD)
        }
        steps: list[tuple[fx.Node, fx.Node, Any]] = []
        entries = self.program.weights.entries(self.region.kind)
        for node, wrong, given in wrong_uses(self.region, entries, known, axis):
            if not wrong.wants:
                raise _CannotPlaceError(node, wrong)
            for operand, wanted in wrong.wants.items():
                has = given.get(operand, known[operand])
                if has == REPLICATE and isinstance(wanted, Split):
                    self._ask(operand, (axis, wanted))
                    return False
                if (has, wanted) not in CONVERSIONS:
                    raise _CannotPlaceError(node, wrong)
                taker = self.region.graph.output_node() if operand is node else node
                steps.append((taker, operand, CONVERSIONS[has, wanted]))
                given[operand] = wanted
        for taker, operand, op in steps:
            over = self.program.config.layout.experts_axis if op is PLACE_EXPERTS else axis
            if (op, over) not in self.steps[taker][operand]:
                self.steps[taker][operand].append((op, over))
        self.values[axis] = known
        return True

    def _ask(self, node: fx.Node, cut: Cut) -> None:
        """Cut the weights that a value is made of, so that ranks have a part of it."""
        axis, wanted = cut
        if node.meta.get("role") is Role.WEIGHT:
            if self.cuts.setdefault(node, cut) != cut:
                raise _CannotPlaceError(node, f"is to be {wanted}, and {self.cuts[node][1]}")
        elif node.op != "call_function":
            raise _CannotPlaceError(node, f"is to be {wanted}, and no weight makes it")
        else:
            try:
                for operand, split in made_from(node, wanted):
                    self._ask(operand, (axis, split))
            except WrongUse as wrong:
                raise _CannotPlaceError(node, wrong) from None

    def sites(self) -> list[list[fx.Node]]:
        """The calls whose values are placed otherwise than what regions are given, in order; those
        together that hand such values to each other."""
        nodes = list(self.region.graph.nodes)
        home: dict[fx.Node, list[fx.Node]] = {}
        for node in filter(self._differs, nodes):
            joined = {id(home[n]): home[n] for n in node.all_input_nodes if n in home}
            site = [n for each in joined.values() for n in each] + [node]
            home.update(dict.fromkeys(site, site))
        found = {id(site): sorted(site, key=nodes.index) for site in home.values()}
        return list(found.values())

    def _differs(self, node: fx.Node) -> bool:
        if node.op != "call_function":
            return False
        for axis, known in self.values.items():
            found = known.get(node)
            if not {REPLICATE, GIVEN[axis]} >= set(found if isinstance(found, tuple) else [found]):
                return True
        return False


class _Site:
    """One rewrite: calls on a rank's parts, and collectives for what others take of them."""

    def __init__(self, edit: Editor, program: Program, inferred: _Inferred) -> None:
        self._edit = edit
        self._program = program
        self._inferred = inferred
        self._made: dict[fx.Node, fx.Node] = {}
        self._converted: dict[tuple[fx.Node, tuple[Any, ...]], fx.Node] = {}

    def make(self, nodes: list[fx.Node]) -> None:
        """Make calls anew, as their values are others now; those that were there stay until nothing
        uses them."""
        edit, inferred = self._edit, self._inferred
        edit.begin_site()
        for weight in dict.fromkeys(n for node in nodes for n in node.all_input_nodes):
            if weight in inferred.cuts:
                keep_part(edit, self._program, weight, inferred.cuts[weight])
        whole: dict[fx.Node, fx.Node] = {}
        for node in nodes:
            self._made[node] = self._anew(node)
            for user in node.users:
                if steps := inferred.steps[user].get(node):
                    now = self._brought(node, steps, before=node)
                    if user not in nodes:
                        whole[node] = now
        for node, now in whole.items():
            edit.swap(node, now)
        edit.close_site()

    def _anew(self, node: fx.Node) -> fx.Node:
        steps = self._inferred.steps[node]
        self._gather(node, steps)

        def taken(operand: fx.Node) -> fx.Node:
            if operand in steps:
                return self._brought(operand, steps[operand], before=node)
            return self._made.get(operand, operand)

        given: Any = fx.node.map_arg((node.args, node.kwargs), taken)
        args, kwargs = given
        if node.target in _VIEWS:
            args = (args[0], self._sizes(node, list(args[1])))
        return self._edit.call(node.target, *args, before=node, name=node.name, **kwargs)

    def _gather(self, node: fx.Node, steps: dict[fx.Node, list[tuple[Any, str]]]) -> None:
        """Bring the operands of a call that are gathered for it, in one message."""
        found = {x: each[0] for x, each in steps.items() if each[0][0] is ALL_GATHER_MANY}
        new = [x for x, step in found.items() if (x, (step,)) not in self._converted]
        if new:
            op, axis = found[new[0]]
            ranks = self._program.config.layout.along(axis)
            xs = [self._made.get(x, x) for x in new]
            many = self._edit.call(op, xs, axis, ranks, before=node)
            made = self._edit.unpack(many, *(f"all_{x.name}" for x in xs), before=node)
            self._converted.update(
                {(x, (found[x],)): rows for x, rows in zip(new, made, strict=True)}
            )

    def _sizes(self, view: fx.Node, sizes: list[Any]) -> list[Any]:
        """The sizes of a view on one rank."""
        for axis, known in self._inferred.values.items():
            found = known[view]
            if isinstance(found, Split) and sizes[found.dim] != -1:
                sizes[found.dim] //= self._program.config.layout.along(axis)
        return sizes

    def _brought(self, value: fx.Node, steps: list[tuple[Any, str]], before: fx.Node) -> fx.Node:
        """A value where its taker has it; each step is made once."""
        now = self._made.get(value, value)
        for count, (op, axis) in enumerate(steps, start=1):
            key = value, tuple(steps[:count])
            if key not in self._converted:
                self._converted[key] = convert(self._edit, self._program, now, op, axis, before)
            now = self._converted[key]
        return now


def convert(
    edit: Editor, program: Program, value: fx.Node, op: Any, axis: str, before: fx.Node
) -> fx.Node:
    """A value in another placement: a collective, or the numbers of experts on a rank."""
    if op is PLACE_EXPERTS:
        return edit.call(op, value, define_places(edit, program), before=before)
    return edit.call(op, value, axis, program.config.layout.along(axis), before=before)


def define_places(edit: Editor, program: Program) -> fx.Node:
    """The weight with the numbers of experts on a rank."""
    layout, count = program.config.layout, program.spec.n_routed_experts
    every = Constant("int64", (layout.ep * count,), Table(-3).numbers(count, layout.ep))
    shard = Shard(layout.experts_axis, layout.ep, 0, count, every)
    program.weights.define(edit.region.kind, PLACES, WeightEntry("int64", (count,), shard))
    return edit.input(Role.WEIGHT, PLACES, (count,), torch.int64)


def keep_part(edit: Editor, program: Program, weight: fx.Node, cut: Cut) -> None:
    """Let each rank have its part of a weight alone."""
    axis, split = cut
    kind, key = edit.region.kind, weight.meta["key"]
    entry = program.weights.remove(kind, key)
    dim, ranks = split.dim + len(entry.shape), program.config.layout.along(axis)
    length, rest = divmod(entry.shape[dim], ranks * split.pieces)
    assert rest == 0, (key, entry.shape, ranks)  # see check_layout
    shape = (*entry.shape[:dim], length * split.pieces, *entry.shape[dim + 1 :])
    expr = Shard(axis, ranks, dim, length, entry.expr, split.pieces)
    program.weights.define(kind, key, WeightEntry(entry.dtype, shape, expr))
    edit.retype(weight, shape, entry.torch_dtype)
