"""Kinds of values on ranks: alike on all, a part of the whole or of a sum, or a lane's own.

Every axis of a layout is looked at by itself: what is a partial sum along one may be alike along
another. The rules follow an op's signature: a size that ranks share out stays shared out in every
result that has it. Where no result has it, the op computed over it: a partial sum if it sums
products over that size (``OpFacts.sums``), and else a wrong program, as no collective mends the
result.
"""

import math
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx

from dsa_compile.ir.match import arguments
from dsa_compile.ops import (
    ALL_GATHER,
    ALL_GATHER_MANY,
    ALL_GATHER_ROWS,
    ALL_REDUCE_ADD_RMS_NORM_QUANTIZE,
    COMBINE,
    FACTS,
    PLACE_EXPERTS,
    POINTWISE,
    REDUCE_SCATTER,
    Family,
)
from dsa_compile.ops.library import SIGNATURES
from dsa_compile.ops.operand_types import Size, TensorType
from dsa_compile.ops.quantize import BLOCK

aten = torch.ops.aten


@dataclass(frozen=True)
class Whole:
    """Alike on all ranks."""

    def __str__(self) -> str:
        return "alike on all ranks"


@dataclass(frozen=True)
class Part:
    """A rank's part along a dimension, which is counted from the last, -1.

    Attributes:
        dim: the dimension.
        pieces: equal ranges of the whole of which a rank has its part each, one behind another: 2
            where gate and up are stacked.
    """

    dim: int
    pieces: int = 1

    def __str__(self) -> str:
        where = f"dimension {self.dim}"
        if self.pieces > 1:
            return f"a rank's part of each of {self.pieces} pieces along {where}"
        return f"a rank's part along {where}"


@dataclass(frozen=True)
class PartialSum:
    """A term of a sum over ranks."""

    def __str__(self) -> str:
        return "a partial sum of its rank"


@dataclass(frozen=True)
class OwnNumbers:
    """Numbers that experts have on their rank."""

    def __str__(self) -> str:
        return "numbers of a rank's own experts"


@dataclass(frozen=True)
class OfLane:
    """Value of a lane alone: its tokens, its caches, and what it computes of them."""

    def __str__(self) -> str:
        return "its lane's own"


RankValue: TypeAlias = Whole | Part | PartialSum | OwnNumbers | OfLane
WHOLE, PARTIAL, OWN, LANE = Whole(), PartialSum(), OwnNumbers(), OfLane()

# What collectives take, but for those that take partial sums.
_TAKEN: dict[Any, RankValue] = {ALL_GATHER: Part(-1), ALL_GATHER_ROWS: LANE, ALL_GATHER_MANY: LANE}
_VIEWS = frozenset({aten.view.default, aten.reshape.default})
_SUMS = frozenset({aten.add.Tensor, aten.sub.Tensor})
_ELEMENTWISE = frozenset({aten.mul.Tensor, aten.div.Tensor, POINTWISE})


class WrongUse(Exception):  # noqa: N818 - its text says what is wrong with a use
    """A call takes a value that is not what it has to be on each rank."""


def rank_value(node: fx.Node, known: Mapping[fx.Node, Any], axis: str) -> Any:
    """Kind of a call's result; a tuple of as many for several results.

    Args:
        node: the call.
        known: of every value that it takes.
        axis: along which ranks are looked at.

    Raises:
        WrongUse: it may not take them.
    """
    target: Any = node.target
    taken = {n: known[n] for n in node.all_input_nodes}
    if target is operator.getitem:
        value, index = taken[node.all_input_nodes[0]], node.args[1]
        assert isinstance(index, int)
        return value[index] if isinstance(value, tuple) else value
    if target in COMBINE:
        return _collected(node, taken, axis)
    values = set(taken.values())
    if values <= {WHOLE, LANE}:
        return _each(node, LANE if LANE in values else WHOLE)
    if LANE in values:
        raise _used(taken, LANE)
    if target in SIGNATURES:
        return _by_signature(node, taken)
    return _of_torch(node, taken)


def _each(node: fx.Node, value: RankValue) -> Any:
    several = node.meta.get("val")
    return (value,) * len(several) if isinstance(several, tuple | list) else value


def _collected(node: fx.Node, taken: Mapping[fx.Node, Any], axis: str) -> Any:
    along = bool(node.args[1] == axis)
    if node.target is ALL_GATHER_MANY:
        xs: Any = node.args[0]
        return tuple(_met(node, x, taken[x], along, axis) for x in xs)
    (x, value), *others = taken.items()
    for other, beside in others:
        if beside not in ({WHOLE} if along else {WHOLE, LANE}):
            raise WrongUse(f"takes {other.name}, which is {beside}, where ranks have one value")
    return _each(node, _met(node, x, value, along, axis))


def _met(node: fx.Node, x: fx.Node, value: RankValue, along: bool, axis: str) -> RankValue:
    """Kind of a collective's result, by the operand that ranks exchange."""
    if not along:  # ranks meet that have alike what they have along this axis
        sums = value == PARTIAL and node.target is not ALL_REDUCE_ADD_RMS_NORM_QUANTIZE
        if not sums and value not in (WHOLE, LANE):
            raise WrongUse(f"takes {x.name}, which is {value} along {axis}, as a value")
        return value
    wanted = _TAKEN.get(node.target, PARTIAL)
    if value != wanted:
        twice = ": reduced or gathered twice" if value == WHOLE else ""
        raise WrongUse(f"takes {x.name}, which is {value}, and not {wanted}{twice}")
    return LANE if node.target is REDUCE_SCATTER else WHOLE


def _of_torch(node: fx.Node, taken: Mapping[fx.Node, Any]) -> Any:
    target: Any = node.target
    values = set(taken.values())
    if target in _SUMS and len(values) == 1 and len(taken) == len(_tensors(node)):
        return values.pop()
    if PARTIAL in values and target not in (*_VIEWS, aten.index_select.default):
        raise _used(taken, PARTIAL)
    first, value = next((n, v) for n, v in taken.items() if v != WHOLE)
    if target in _VIEWS:
        return _viewed(node, first, value)
    if target in (*_ELEMENTWISE, *_SUMS, aten.cat.default):
        if len(values) == 1:
            return value
        raise _used(taken, value)
    if target is aten.split_with_sizes.default:
        return _split(node, first, value)
    rows = isinstance(value, Part) and value.dim == -1
    if target is aten.index_select.default and not rows:
        return value
    raise WrongUse(f"takes {first.name}, which is {value}: {target} has no rule for it")


def _by_signature(node: fx.Node, taken: Mapping[fx.Node, Any]) -> Any:
    target: Any = node.target
    signature, given = SIGNATURES[target], dict(zip(*arguments(node), strict=True))
    if target is PLACE_EXPERTS:
        if isinstance(taken.get(given["places"]), Part) and taken.get(given["indices"]) == WHOLE:
            return OWN
        raise WrongUse("takes places and choices that do not go together")
    cut: dict[str, _Share] = {}  # by the names of sizes that ranks share out
    for name, declared in signature.operands.items():
        operand = given.get(name)
        if operand is None or taken[operand] == WHOLE:
            continue
        value = taken[operand]
        if isinstance(value, Part):
            share = _Share(name, value.pieces / _factor(declared, value.dim))
            cut |= dict.fromkeys(_names(declared, value.dim), share)
        elif not (value == OWN and name == "indices"):
            raise _used(taken, value)
    _check_alike(node, taken, given, cut)
    facts = FACTS[target]
    own = OWN in taken.values()
    if own != ("E" in cut and facts.family is Family.EXPERTS):
        raise WrongUse(
            "takes experts of its rank by numbers among all of them"
            if not own
            else "takes all experts by the numbers that they have on a rank"
        )
    kept = [_result(result, cut) for result in signature.results]
    lost = set(cut) - {name for r in signature.results for s in r.sizes for name in s.names}
    if facts.family is Family.NORM and any(isinstance(k, Part) and k.dim == -1 for k in kept):
        raise WrongUse("norms a part of a row for the row")
    if lost and not lost <= set(facts.sums):
        about = ", ".join(f"{name} of {cut[name].operand}" for name in sorted(lost))
        raise WrongUse(f"computes over {about}, of which its rank has a part, and it is no sum")
    if lost:
        kept = [PARTIAL for _ in kept]
    return tuple(kept) if len(kept) != 1 else kept[0]


def _check_alike(
    node: fx.Node,
    taken: Mapping[fx.Node, Any],
    given: Mapping[str, Any],
    cut: Mapping[str, "_Share"],
) -> None:
    """A size that one operand has a part of, every operand has the same part of."""
    for name, declared in SIGNATURES[node.target].operands.items():  # type: ignore[index]
        operand = given.get(name)
        if operand is None:
            continue
        for at, size in enumerate(declared.sizes, -len(declared.sizes)):
            for shared in set(size.names) & cut.keys():
                pieces = cut[shared].pieces * _factor(declared, at)
                if pieces.denominator > 1:
                    raise WrongUse(
                        f"takes {cut[shared].operand} in pieces, and {name} {operand.name} in one"
                    )
                if taken[operand] != Part(at, int(pieces)):
                    raise WrongUse(
                        f"takes {name} {operand.name}, which is {taken[operand]}, where {shared} "
                        f"of {cut[shared].operand} is a rank's part"
                    )


def _names(declared: TensorType, dim: int) -> Sequence[str]:
    if -dim > len(declared.sizes):
        return [str(declared.leading)]
    return declared.sizes[dim].names


@dataclass(frozen=True)
class _Share:
    """A size of which a rank has its share: an operand that has it, and its pieces."""

    operand: str
    pieces: Fraction


def _factor(declared: TensorType, dim: int) -> Fraction:
    """Factor of a size over its name: 2 of ``2 * I``, a half of ``W // 2``.

    Blocks, ``W // 128``, are one behind another as the values are: one range.
    """
    if -dim > len(declared.sizes):
        return Fraction(1)
    size: Size = declared.sizes[dim]
    times, over = re.match(r"(\d+) \* ", size.text), re.search(r" // (\d+)", size.text)
    divisor = int(over[1]) if over else 1
    return Fraction(int(times[1]) if times else 1, 1 if divisor == BLOCK else divisor)


def _result(declared: TensorType, cut: Mapping[str, _Share]) -> RankValue:
    for at, size in enumerate(declared.sizes, -len(declared.sizes)):
        for name in size.names:
            if name not in cut:
                continue
            pieces = cut[name].pieces * _factor(declared, at)
            if pieces.denominator > 1:
                raise WrongUse(
                    f"takes {cut[name].operand} as {_factor(declared, at).denominator} pieces, of "
                    "each of which its rank needs a part, and it has one part of the whole"
                )
            return Part(at, int(pieces))
    return WHOLE


def _viewed(node: fx.Node, source: fx.Node, value: RankValue) -> RankValue:
    """Views keep a part that begins a dimension of theirs."""
    if not isinstance(value, Part):
        return value
    if value.pieces > 1:
        raise WrongUse(f"views {source.name}, which is {value}")
    before, after = (_sizes(n.meta["val"]) for n in (source, node))
    behind = math.prod(before[value.dim :])
    for dim in range(-len(after), 0):
        if math.prod(after[dim:]) == behind:
            return Part(dim)
    raise WrongUse(f"views {source.name}, which is {value}, in rows that mix ranks")


def _split(node: fx.Node, source: fx.Node, value: RankValue) -> tuple[RankValue, ...]:
    """A split along the dimension of a part must give its pieces."""
    x, sizes, along = arguments(node)[1]
    dim = along if along < 0 else along - x.meta["val"].dim()
    if not isinstance(value, Part) or value.dim != dim:
        return (value,) * len(sizes)
    if value.pieces != len(sizes) or len(set(sizes)) > 1:
        raise WrongUse(f"splits {source.name} in {len(sizes)}, which is {value}")
    return (Part(dim),) * len(sizes)


def _sizes(value: Tensor) -> list[int]:
    shape: Sequence[Any] = value.shape
    return [s.node.hint if isinstance(s, torch.SymInt) else s for s in shape]


def _tensors(node: fx.Node) -> list[fx.Node]:
    return [each for each in node.args if isinstance(each, fx.Node)]


def _used(taken: Mapping[fx.Node, Any], value: RankValue) -> WrongUse:
    names = [node.name for node, found in taken.items() if found == value]
    others = [f"{n.name} ({v})" for n, v in taken.items() if v != value]
    beside = f" beside {', '.join(others)}" if others else ""
    return WrongUse(f"takes {', '.join(names)} as a value{beside}, and it is {value}")
