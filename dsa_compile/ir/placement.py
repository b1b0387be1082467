"""Inference of placements: what each rank holds of a call's results, given its operands.

The rules follow an op's signature: a size that ranks share out stays shared out in every result
that has it. Where no result has it, the op computed over it: a partial sum if it sums products over
that size (``OpFacts.sums``), and else a wrong program, as no collective mends the result.

A call that may not take an operand as it is placed says, where it can, how it would take it. The
pass ``place`` makes it so, and the checks of a program refuse it: both ask the same rules.
"""

import math
import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, fx

from dsa_compile.facts.placements import (
    GIVEN,
    NUMBERS,
    PARTIAL,
    REPLICATE,
    TOKENS,
    Placement,
    Split,
)
from dsa_compile.ir.match import arguments
from dsa_compile.ops import (
    ALL_GATHER,
    ALL_GATHER_MANY,
    ALL_REDUCE,
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

CONVERSIONS: dict[tuple[Placement, Placement], Any] = {
    (PARTIAL, REPLICATE): ALL_REDUCE,
    (PARTIAL, TOKENS): REDUCE_SCATTER,
    (Split(-1), REPLICATE): ALL_GATHER,
    (TOKENS, REPLICATE): ALL_GATHER_MANY,
    (REPLICATE, NUMBERS): PLACE_EXPERTS,
}
"""The op that brings a value from one placement to another."""

# What collectives take, but for those that take partial sums.
_TAKEN: dict[Any, Placement] = {
    ALL_GATHER: Split(-1),
    ALL_GATHER_MANY: TOKENS,
}
_VIEWS = frozenset({aten.view.default, aten.reshape.default})
_SUMS = frozenset({aten.add.Tensor, aten.sub.Tensor})
_ELEMENTWISE = frozenset({aten.mul.Tensor, aten.div.Tensor, POINTWISE})


class WrongUse(Exception):  # noqa: N818 - its text says what is wrong with a use
    """A call takes a value that is not placed as it has to be.

    Attributes:
        wants: operands, and placements of which the call would take them; none where it does not
            help to place them otherwise.
    """

    def __init__(self, text: str, wants: Mapping[fx.Node, Placement] | None = None) -> None:
        super().__init__(text)
        self.wants = wants or {}


def placement_of(node: fx.Node, known: Mapping[fx.Node, Any], axis: str) -> Any:
    """Placement of a call's result; a tuple of as many for several results.

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
    if values <= {REPLICATE, TOKENS}:
        return _each(node, TOKENS if TOKENS in values else REPLICATE)
    if TOKENS in values:
        raise _used(taken, PARTIAL if PARTIAL in values else TOKENS, axis)
    if target in SIGNATURES:
        return _by_signature(node, taken, axis)
    return _of_torch(node, taken, axis)


def _each(node: fx.Node, value: Placement) -> Any:
    several = node.meta.get("val")
    return (value,) * len(several) if isinstance(several, tuple | list) else value


def _collected(node: fx.Node, taken: Mapping[fx.Node, Any], axis: str) -> Any:
    along = bool(node.args[1] == axis)
    if node.target is ALL_GATHER_MANY:
        xs: Any = node.args[0]
        return tuple(_met(node, x, taken[x], along, axis) for x in xs)
    (x, value), *others = taken.items()
    for other, beside in others:
        if beside not in ({REPLICATE} if along else {REPLICATE, TOKENS}):
            raise WrongUse(f"takes {other.name}, which is {beside}, where ranks have one value")
    return _each(node, _met(node, x, value, along, axis))


def _met(node: fx.Node, x: fx.Node, value: Placement, along: bool, axis: str) -> Placement:
    """Kind of a collective's result, by the operand that ranks exchange."""
    if not along:  # ranks meet that have alike what they have along this axis
        sums = value == PARTIAL and node.target is not ALL_REDUCE_ADD_RMS_NORM_QUANTIZE
        if not sums and value not in (REPLICATE, TOKENS):
            raise WrongUse(f"takes {x.name}, which is {value} along {axis}, as a value")
        return value
    wanted = _TAKEN.get(node.target, PARTIAL)
    if value != wanted:
        twice = ": reduced or gathered twice" if value == REPLICATE else ""
        raise WrongUse(f"takes {x.name}, which is {value}, and not {wanted}{twice}")
    return TOKENS if node.target is REDUCE_SCATTER else REPLICATE


def _of_torch(node: fx.Node, taken: Mapping[fx.Node, Any], axis: str) -> Any:
    target: Any = node.target
    values = set(taken.values())
    if target in _SUMS and len(values) == 1 and len(taken) == len(_tensors(node)):
        return values.pop()
    if PARTIAL in values and target not in (*_VIEWS, aten.index_select.default):
        raise _used(taken, PARTIAL, axis)
    first, value = next((n, v) for n, v in taken.items() if v != REPLICATE)
    if target in _VIEWS:
        return _viewed(node, first, value)
    if target in (*_ELEMENTWISE, *_SUMS, aten.cat.default):
        if len(values) == 1:
            return value
        raise _used(taken, value, axis)
    if target is aten.split_with_sizes.default:
        return _split(node, first, value)
    rows = isinstance(value, Split) and value.dim == -1
    if target is aten.index_select.default and not rows:
        return value
    raise WrongUse(f"takes {first.name}, which is {value}: {target} has no rule for it")


def _by_signature(node: fx.Node, taken: Mapping[fx.Node, Any], axis: str) -> Any:
    target: Any = node.target
    signature, given = SIGNATURES[target], dict(zip(*arguments(node), strict=True))
    if target is PLACE_EXPERTS:
        if (
            isinstance(taken.get(given["places"]), Split)
            and taken.get(given["indices"]) == REPLICATE
        ):
            return NUMBERS
        raise WrongUse("takes places and choices that do not go together")
    cut: dict[str, _Share] = {}  # by the names of sizes that ranks share out
    for name, declared in signature.operands.items():
        operand = given.get(name)
        if operand is None or taken[operand] == REPLICATE:
            continue
        value = taken[operand]
        if isinstance(value, Split):
            share = _Share(name, value.pieces / _factor(declared, value.dim))
            cut |= dict.fromkeys(_names(declared, value.dim), share)
        elif not (value == NUMBERS and name == "indices"):
            raise _used(taken, value, axis)
    _check_alike(node, taken, given, cut)
    facts = FACTS[target]
    own = NUMBERS in taken.values()
    if own != ("E" in cut and facts.family is Family.EXPERTS):
        if own:
            raise WrongUse("takes all experts by the numbers that they have on a rank")
        wants = {given["indices"]: NUMBERS} if "indices" in given else {}
        raise WrongUse("takes experts of its rank by numbers among all of them", wants)
    kept = [_result(result, cut) for result in signature.results]
    lost = set(cut) - {name for r in signature.results for s in r.sizes for name in s.names}
    if facts.family is Family.NORM and any(isinstance(k, Split) and k.dim == -1 for k in kept):
        parts = {n: REPLICATE for n, value in taken.items() if isinstance(value, Split)}
        raise WrongUse("norms a part of a row for the row", parts)
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
                if taken[operand] != Split(at, int(pieces)):
                    raise WrongUse(
                        f"takes {name} {operand.name}, which is {taken[operand]}, where {shared} "
                        f"of {cut[shared].operand} is a rank's part",
                        {operand: Split(at, int(pieces))},
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


def _result(declared: TensorType, cut: Mapping[str, _Share]) -> Placement:
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
            return Split(at, int(pieces))
    return REPLICATE


def _viewed(node: fx.Node, source: fx.Node, value: Placement) -> Placement:
    """Views keep a part that begins a dimension of theirs, whichever of the two is the view."""
    if not isinstance(value, Split):
        return value
    if value.pieces > 1:
        raise WrongUse(f"views {source.name}, which is {value}")
    before, after = (_sizes(n.meta["val"]) for n in (source, node))
    behind = math.prod(before[value.dim :])
    for dim in range(-len(after), 0):
        if math.prod(after[dim:]) == behind:
            return Split(dim)
    raise WrongUse(f"views {source.name}, which is {value}, in rows that mix ranks")


def made_from(node: fx.Node, wanted: Split, index: int = 0) -> Iterator[tuple[fx.Node, Split]]:
    """The operands of a call that must be split for one of its results to be.

    Args:
        node: the call.
        wanted: of the result.
        index: of it, where there are several.

    Raises:
        WrongUse: the result is split in no way that this module knows.
    """
    target: Any = node.target
    source: Any = node.args[0]
    if target is operator.getitem:
        yield source, wanted
    elif target in _VIEWS:
        yield source, _viewed(source, node, wanted)  # type: ignore[misc]
    elif target is aten.split_with_sizes.default and _dim_of_split(node) != wanted.dim:
        yield source, wanted
    elif target in SIGNATURES and target not in COMBINE:
        signature, given = SIGNATURES[target], dict(zip(*arguments(node), strict=True))
        names = set(_names(signature.results[index], wanted.dim))
        found = [
            (given[name], Split(at, wanted.pieces))
            for name, declared in signature.operands.items()
            for at, size in enumerate(declared.sizes, -len(declared.sizes))
            if names & set(size.names) and isinstance(given.get(name), fx.Node)
        ]
        if not found:
            raise WrongUse(f"is to be split along dimension {wanted.dim}, which no operand has")
        yield from found
    else:
        raise WrongUse(f"is to be split: {target} has no rule for it")


def _split(node: fx.Node, source: fx.Node, value: Placement) -> tuple[Placement, ...]:
    """A split along the dimension of a part must give its pieces."""
    sizes, dim = arguments(node)[1][1], _dim_of_split(node)
    if not isinstance(value, Split) or value.dim != dim:
        return (value,) * len(sizes)
    if value.pieces != len(sizes) or len(set(sizes)) > 1:
        raise WrongUse(f"splits {source.name} in {len(sizes)}, which is {value}")
    return (Split(dim),) * len(sizes)


def _dim_of_split(node: fx.Node) -> int:
    x, _, along = arguments(node)[1]
    return int(along) if along < 0 else int(along) - int(x.meta["val"].dim())


def _sizes(value: Tensor) -> list[int]:
    shape: Sequence[Any] = value.shape
    return [s.node.hint if isinstance(s, torch.SymInt) else s for s in shape]


def _tensors(node: fx.Node) -> list[fx.Node]:
    return [each for each in node.args if isinstance(each, fx.Node)]


def _used(taken: Mapping[fx.Node, Any], value: Placement, axis: str) -> WrongUse:
    names = [node.name for node, found in taken.items() if found == value]
    others = [f"{n.name} ({v})" for n, v in taken.items() if v != value]
    beside = f" beside {', '.join(others)}" if others else ""
    wanted = GIVEN[axis] if value == PARTIAL else REPLICATE
    return WrongUse(
        f"takes {', '.join(names)} as a value{beside}, and it is {value}",
        {node: wanted for node, found in taken.items() if found == value},
    )
