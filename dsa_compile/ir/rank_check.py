"""Whether a program of several ranks is one: what they share, and that they meet in one order.

What a region takes and returns, and what caches hold, is alike on all ranks of a lane: only weights
differ, and collectives make alike again what comes of them. Lanes have values and caches of their
own, and meet where experts take the tokens of all. All variants of a kind list the same
collectives on operands of the same types, so that ranks meet whichever variant each of them runs.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import fx
from torch._ops import OpOverload

from dsa_compile.facts.layout import DP, TP, WORLD
from dsa_compile.ir.dims import describe
from dsa_compile.ir.hazards import COLLECTIVES
from dsa_compile.ir.program import Program
from dsa_compile.ir.rank_values import (
    LANE,
    PARTIAL,
    WHOLE,
    Part,
    RankValue,
    WrongUse,
    rank_value,
)
from dsa_compile.ir.refusal import made_by
from dsa_compile.ir.region import Region, Role
from dsa_compile.ops import STREAM_OPS
from dsa_compile.weights.plan import (
    Concat,
    Expr,
    Narrow,
    QuantizedScales,
    QuantizedValues,
    Reshape,
    Shard,
    Transpose,
    WeightEntry,
)


def rank_problems(program: Program) -> Iterator[str]:
    """Problems of a program of several ranks, a sentence each; lazily."""
    axes = [axis for axis in (TP, DP) if program.config.layout.along(axis) > 1]
    for region in program.regions.values():
        weights = program.weights.entries(region.kind)
        for axis in axes:
            known: dict[fx.Node, Any] = {}
            yield from region_problems(region, weights, known, axis)
    yield from _order_problems(program)


def region_problems(
    region: Region,
    weights: Mapping[str, WeightEntry],
    known: dict[fx.Node, Any],
    axis: str = TP,
) -> Iterator[str]:
    """The first wrong use of a value, or the results that are not what ranks hand on.

    Args:
        region: one of a program.
        weights: of its kind, by key.
        known: filled with what each value is.
        axis: along which ranks are looked at.
    """
    own = LANE if axis == DP else WHOLE  # of batches, caches and what regions hand on

    def problem(node: fx.Node, reason: object) -> str:
        where = node.meta.get("path") or "top"
        return f"{region.name}: {where}: node {node.name} {reason}{made_by(node)}"

    for node in region.graph.nodes:
        if node.op == "placeholder":
            cut = node.meta["role"] is Role.WEIGHT
            try:
                known[node] = weight_value(weights[node.meta["key"]], axis) if cut else own
            except WrongUse as wrong:
                yield problem(node, wrong)
                return
        elif node.op == "call_function" and node.target not in STREAM_OPS:
            try:
                known[node] = rank_value(node, known, axis)
            except WrongUse as wrong:
                yield problem(node, wrong)
                return
    results: Any = region.graph.output_node().args[0]
    for name, node in zip(region.outputs, results, strict=True):
        if known[node] != own:
            lacks = "an all-reduce" if known[node] == PARTIAL else "an all-gather"
            lacks = "a reduce-scatter" if own == LANE else lacks
            yield problem(node, f"is returned as {name} and is {known[node]}: {lacks} is missing")


def weight_value(entry: WeightEntry, axis: str = TP) -> RankValue:
    """Value of a weight on each rank along an axis: whole, or a part.

    Raises:
        WrongUse: some of its parts are shared out, and others are not.
    """
    cut = _cut(entry.expr, axis)
    return WHOLE if cut is None else Part(cut.dim - len(entry.shape), cut.pieces)


def _cut(expr: Expr, axis: str) -> Part | None:
    """The dimension that ranks share out, counted from the first; None for what is whole."""
    match expr:
        case Shard():
            if expr.axis in (axis, WORLD):
                return Part(expr.dim, expr.stacked)
            return _cut(expr.of, axis)
        case Concat():
            cuts = {_cut(part, axis) for part in expr.parts}
            if len(cuts) > 1:
                found = ", ".join(sorted("none of" if c is None else str(c) for c in cuts))
                raise WrongUse(f"joins parts that ranks share out otherwise: {found}")
            cut = cuts.pop()
            if cut is not None and cut.dim == expr.dim:
                return replace(cut, pieces=cut.pieces * len(expr.parts))
            return cut
        case Transpose():
            cut = _cut(expr.of, axis)
            turned = {expr.dim0: expr.dim1, expr.dim1: expr.dim0}
            return None if cut is None else replace(cut, dim=turned.get(cut.dim, cut.dim))
        case Reshape():
            cut = _cut(expr.of, axis)
            if cut is not None and expr.shape[0] != 1:  # 1: a dimension is put in front
                raise WrongUse(f"takes rows of {expr.shape} from parts that ranks share out")
            return None if cut is None else replace(cut, dim=cut.dim + 1)
        case Narrow() | QuantizedValues() | QuantizedScales():
            return _cut(expr.of, axis)
    return None


def _order_problems(program: Program) -> Iterator[str]:
    for kind in program.order:
        regions = [region for region in program.regions.values() if region.kind == kind]
        first, *others = [(region.name, _collectives(region)) for region in regions]
        for name, found in others:
            if found != first[1]:
                yield (
                    f"{name}: meets other ranks in {_listed(found)}, and {first[0]} in "
                    f"{_listed(first[1])}: ranks that run one of each would wait for ever"
                )


def _collectives(region: Region) -> list[str]:
    return [
        f"{node.target}({describe(node.all_input_nodes[0].meta['val'])}, {node.args[1]}, "
        f"{node.args[2]})"
        for node in region.graph.nodes
        if isinstance(node.target, OpOverload) and node.target in COLLECTIVES
    ]


def _listed(found: list[str]) -> str:
    return ", then ".join(found) or "none"
