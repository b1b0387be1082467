"""Weights of one rank: shards in expressions replaced by the windows that the rank reads.

A plan is the same for all ranks; a rank's number is known only when it loads its weights.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from dsa_compile.facts.layout import numbers_along
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
    WeightPlan,
)


def shards(expr: Expr) -> Iterator[Shard]:
    """Yield the shards in an expression, the outer ones first."""
    match expr:
        case Shard():
            yield expr
            yield from shards(expr.of)
        case Concat():
            for part in expr.parts:
                yield from shards(part)
        case Narrow() | Reshape() | Transpose() | QuantizedValues() | QuantizedScales():
            yield from shards(expr.of)


def at_rank(expr: Expr, ranks: Mapping[str, int]) -> Expr:
    """An expression without shards: what one rank reads.

    Args:
        expr: of a plan.
        ranks: the rank's number along each axis of the layout.
    """
    match expr:
        case Shard(axis, count, dim, length, of, stacked):
            whole = at_rank(of, ranks)
            starts = [(piece * count + ranks[axis]) * length for piece in range(stacked)]
            parts = tuple(Narrow(dim, start, length, whole) for start in starts)
            return parts[0] if stacked == 1 else Concat(dim, parts)
        case Concat():
            return replace(expr, parts=tuple(at_rank(part, ranks) for part in expr.parts))
        case Narrow() | Reshape() | Transpose() | QuantizedValues() | QuantizedScales():
            return replace(expr, of=at_rank(expr.of, ranks))
    return expr


def entry_at_rank(entry: WeightEntry, ranks: Mapping[str, int]) -> WeightEntry:
    """Weight as one rank makes it."""
    return replace(entry, expr=at_rank(entry.expr, ranks))


def plan_at_rank(plan: WeightPlan, ranks: Mapping[str, int]) -> WeightPlan:
    """Plan as one rank carries it out."""
    found = WeightPlan()
    for kind in plan.kinds():
        for key, entry in plan.entries(kind).items():
            found.define(kind, key, entry_at_rank(entry, ranks))
    return found


def file_stem(call: str, expr: Expr, ranks: Mapping[str, int]) -> str:
    """The packed file that has a rank's part of a weight: ``layer_3``, or ``layer_3.tp1`` of those
    that differ between ranks.

    Args:
        call: whose weight it is.
        expr: of the weight, with its shards.
        ranks: as for :func:`at_rank`.
    """
    axes = dict.fromkeys(shard.axis for shard in shards(expr))
    return ".".join((call, *(f"{axis}{ranks[axis]}" for axis in axes)))


def every_rank(expr: Expr) -> tuple[dict[str, int], ...]:
    """The ranks among which a weight differs, each by its numbers; one where it is whole."""
    return numbers_along({shard.axis: shard.ranks for shard in shards(expr)})
