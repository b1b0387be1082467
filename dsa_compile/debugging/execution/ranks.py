"""All ranks of a layout in one process: a value that differs between ranks is one for each.

Calls whose operands are alike on all ranks run once; others run once a rank, and a collective is
what it makes of all ranks' operands. No process, thread or order of arrival is involved.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch.utils._pytree import register_pytree_node

from dsa_compile.layout import TP
from dsa_compile.weights.plan import WeightEntry
from dsa_compile.weights.ranks import entry_at_rank, every_rank


class Ranks(tuple[Any, ...]):
    """A value that differs between ranks: that of each, in their order."""

    __slots__ = ()


register_pytree_node(Ranks, lambda value: (list(value), None), lambda parts, _: Ranks(parts))


def on_ranks(
    function: Callable[..., Any], combine: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """A function that also takes :class:`Ranks`, alone and in lists and tuples.

    A result of several values is several values, each of them one for each rank.

    Args:
        function: of one rank.
        combine: for a collective, what each of the ranks that meet gets of their first operands.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        if combine is not None:
            x, axis, ranks, *rest = args
            args = (_met(combine, x, axis, ranks), axis, 1, *rest)
        count = _ranks((args, tuple(kwargs.values())))
        if not count:
            return function(*args, **kwargs)
        results = []
        for rank in range(count):
            named = {name: of_rank(value, rank) for name, value in kwargs.items()}
            results.append(function(*of_rank(args, rank), **named))
        return _turned(results)

    return call


def of_rank(value: Any, rank: int) -> Any:
    """What one rank has of a value."""
    if isinstance(value, Ranks):
        return value[rank]
    if isinstance(value, tuple | list):
        return type(value)([of_rank(item, rank) for item in value])
    return value


def on_each_rank(entry: WeightEntry, make: Callable[[WeightEntry], Any]) -> Any:
    """A weight on all ranks: one tensor where it is whole, else one for each.

    Args:
        entry: as the plan has it.
        make: the weight of an entry without shards.
    """
    places = every_rank(entry.expr)
    if len(places) == 1:
        return make(entry)
    return Ranks(make(entry_at_rank(entry, place)) for place in places)


def parts_of(value: Any) -> Sequence[Any]:
    """The values of all ranks; of one that is alike on all, that one."""
    return value if isinstance(value, Ranks) else (value,)


def _met(combine: Callable[..., Any], x: Any, axis: str, ranks: int) -> Any:
    """What every rank gets where the ranks along an axis meet; one value where all get the same."""
    values = x if isinstance(x, Ranks) else Ranks([x] * ranks)
    apart = 1 if axis == TP else len(values) // ranks  # ranks of a lane follow one another
    found: list[Any] = [None] * len(values)
    for first in range(len(values)):
        if first // apart % ranks == 0:
            members = range(first, first + apart * ranks, apart)
            results = combine([values[member] for member in members])
            for member, result in zip(members, results, strict=True):
                found[member] = result
    return found[0] if all(each is found[0] for each in found) else Ranks(found)


def _ranks(value: Any) -> int:
    if isinstance(value, Ranks):
        return len(value)
    if isinstance(value, tuple | list):
        return max(map(_ranks, value), default=0)
    return 0


def _turned(results: list[Any]) -> Any:
    """Results of ranks as a result of values of ranks."""
    first = results[0]
    if first is None:
        return None
    if isinstance(first, tuple | list):
        return type(first)([Ranks(each) for each in zip(*results, strict=True)])
    return Ranks(results)
