"""Placements: what each rank holds of a tensor along one axis of a layout, as data.

Every axis of a layout is looked at by itself: what is a partial sum along one may be alike along
another. :func:`weight_rows` and :data:`GIVEN` say what ranks hold of a model's weights and of what
its graphs are given; everything else follows (:mod:`dsa_compile.ir.placement`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from dsa_compile.facts.layout import DP, TP, Layout


class Kind(StrEnum):
    """What a rank holds where that is no part along a dimension, as messages say it."""

    REPLICATE = "alike on all ranks"
    PARTIAL = "a partial sum of its rank"  # a term of a sum over ranks
    TOKENS = "its lane's own"  # tokens of its own, their caches, what is computed from them
    NUMBERS = "numbers of a rank's own experts"  # of choices among the entries of a table


@dataclass(frozen=True)
class Split:
    """A rank's part along a dimension.

    Attributes:
        dim: the dimension, counted from the last, -1.
        pieces: the order in which parts lie: the whole is so many equal ranges, one after another,
            and a rank has its part of each. 2 where gate and up are stacked; as many as a rank
            has elements where ranks take them in turn.
    """

    dim: int
    pieces: int = 1

    def __str__(self) -> str:
        of = f" of each of {self.pieces} pieces" if self.pieces > 1 else ""
        return f"a rank's part{of} along dimension {self.dim}"


@dataclass(frozen=True)
class Table(Split):
    """Whole entries of weights along a dimension, as many on each rank; a table, which is a weight
    of its own, has their numbers."""

    def numbers(self, count: int, ranks: int) -> tuple[int, ...]:
        """The map: for each rank the number that each of ``count`` entries has on it, -1 for those
        of other ranks, rank after rank. A rank has a run of them, in their order."""
        own = count // ranks
        return tuple(
            entry - rank * own if entry // own == rank else -1
            for rank in range(ranks)
            for entry in range(count)
        )


Placement: TypeAlias = Kind | Split
REPLICATE, PARTIAL, TOKENS, NUMBERS = Kind

GIVEN: dict[str, Placement] = {DP: TOKENS, TP: REPLICATE}
"""What ranks hold, by axis, of what a region is given and returns: batches, caches, values."""


@dataclass(frozen=True)
class WeightRow:
    """Placement of the weights that have a role in a model: an operand of an op, or what the
    operand is computed from.

    Attributes:
        op: of the namespace ``dsa``.
        operand: the argument's name.
        axis: over whose ranks it is placed.
        placement: there.
        part: of the model, to read.
        place: where the op's region stands in a step, if it is this one alone that is meant.
    """

    op: str
    operand: str
    axis: str
    placement: Split
    part: str
    place: str = ""


def weight_rows(layout: Layout) -> Iterator[WeightRow]:
    """Rows for the weights that a layout does not replicate.

    A weight that none names is placed as those that it meets ask for: the output projection has
    the columns that take its rank's heads.
    """
    if layout.tp > 1:
        yield WeightRow("absorb_query", "w_uk", TP, Split(-3), "attention")
        yield WeightRow("expand_output", "w_uv", TP, Split(-3), "attention")
        yield WeightRow("swiglu", "gate", TP, Split(-1), "MLP")
        yield WeightRow("swiglu", "up", TP, Split(-1), "MLP")
        yield WeightRow("linear", "weight", TP, Split(-2), "head", place="head")
    if layout.shard_embedding:
        yield WeightRow("embedding", "weight", TP, Split(-1), "embedding")
    if layout.world > 1:
        axis, whole = layout.experts_axis, layout.ep > 1
        yield WeightRow("experts", "gate_up", axis, Table(-3) if whole else Split(-2, 2), "MLP")
        yield WeightRow("experts", "down", axis, Table(-3) if whole else Split(-1), "MLP")
