"""Whether a program of several ranks is one: what they share, and that they meet in one order.

What a region takes and returns, and what caches hold, is alike on all ranks of a lane: only weights
differ, and collectives make alike again what comes of them. Lanes have values and caches of their
own, and meet where experts take the tokens of all. All variants of a kind list the same
collectives on operands of the same types, so that ranks meet whichever variant each of them runs.
"""

from collections import ChainMap
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import fx
from torch._ops import OpOverload

from dsa_compile.facts.layout import DP, TP, WORLD
from dsa_compile.facts.placements import GIVEN, PARTIAL, REPLICATE, TOKENS, Placement, Split
from dsa_compile.ir.hazards import COLLECTIVES
from dsa_compile.ir.placement import WrongUse, placement_of
from dsa_compile.ir.program import Program
from dsa_compile.ir.refusal import made_by
from dsa_compile.ir.region import Region, Role
from dsa_compile.ir.tensor_info import describe
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


def placement_problems(program: Program) -> Iterator[str]:
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
    """The first wrong use of a value, a sentence; none in a sound region.

    Args:
        region: one of a program.
        weights: of its kind, by key.
        known: filled with the placement of each value.
        axis: along which ranks are looked at.
    """
    for node, wrong, _ in wrong_uses(region, weights, known, axis):
        where = node.meta.get("path") or "top"
        yield f"{region.name}: {where}: node {node.name} {wrong}{made_by(node)}"
        return


def wrong_uses(
    region: Region, weights: Mapping[str, WeightEntry], known: dict[fx.Node, Any], axis: str
) -> Iterator[tuple[fx.Node, WrongUse, dict[fx.Node, Placement]]]:
    """Infer the placement of every value of a region.

    Args:
        region: one of a program.
        weights: of its kind, by key.
        known: filled with the placement of each value; those that it has already stay.
        axis: along which ranks are looked at.

    Yields:
        A call that does not take its operands as they are placed, or a value that is returned and
        not what regions hand on; why; and an empty dict, for the placements of which it is to be
        given these operands instead. Inference goes on with these.
    """
    own = GIVEN[axis]
    for node in region.graph.nodes:
        if node in known or node.target in STREAM_OPS:
            continue
        given: dict[fx.Node, Placement] = {}
        seen = ChainMap[fx.Node, Any](given, known)
        while node.op in ("placeholder", "call_function"):
            try:
                if node.op == "call_function":
                    known[node] = placement_of(node, seen, axis)
                elif node.meta["role"] is Role.WEIGHT:
                    known[node] = weight_placement(weights[node.meta["key"]], axis)
                else:
                    known[node] = own
                break
            except WrongUse as wrong:
                yield node, wrong, given
    results: Any = region.graph.output_node().args[0]
    for name, node in zip(region.outputs, results, strict=True):
        if known[node] != own:
            lacks = "an all-reduce" if known[node] == PARTIAL else "an all-gather"
            lacks = "a reduce-scatter" if own == TOKENS else lacks
            text = f"is returned as {name} and is {known[node]}: {lacks} is missing"
            yield node, WrongUse(text, {node: own}), {}


def weight_placement(entry: WeightEntry, axis: str = TP) -> Placement:
    """Value of a weight on each rank along an axis: whole, or a part.

    Raises:
        WrongUse: some of its parts are shared out, and others are not.
    """
    cut = _cut(entry.expr, axis)
    return REPLICATE if cut is None else Split(cut.dim - len(entry.shape), cut.pieces)


def _cut(expr: Expr, axis: str) -> Split | None:
    """The dimension that ranks share out, counted from the first; None for what is whole."""
    match expr:
        case Shard():
            if expr.axis in (axis, WORLD):
                return Split(expr.dim, expr.stacked)
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
        f"{node.target}({describe(node.all_input_nodes[0].meta['val'])!r}, {node.args[1]}, "
        f"{node.args[2]})"
        for node in region.graph.nodes
        if isinstance(node.target, OpOverload) and node.target in COLLECTIVES
    ]


def _listed(found: list[str]) -> str:
    return ", then ".join(found) or "none"
