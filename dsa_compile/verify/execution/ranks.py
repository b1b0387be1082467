"""All ranks of a layout in one process: a value that differs between ranks is one for each.

Calls whose operands are alike on all ranks run once; others run once a rank, and a collective is
what it makes of all ranks' operands. No process, thread or order of arrival is involved.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch.utils._pytree import register_pytree_node

from dsa_compile.facts.layout import DP, TP, WORLD, layout_along, numbers_along
from dsa_compile.weights.plan import WeightEntry
from dsa_compile.weights.ranks import entry_at_rank, every_rank


class Ranks(tuple[Any, ...]):
    """A value that differs between ranks: that of each along an axis, by their numbers along it.

    Args:
        values: those.
        axis: ``tp``, and all lanes have the same ones; ``dp``, and the ranks of a lane are alike;
            ``world``.
    """

    axis: str

    def __new__(cls, values: Iterable[Any], axis: str) -> "Ranks":
        """Values along an axis."""
        made = super().__new__(cls, values)
        made.axis = axis
        return made


register_pytree_node(
    Ranks, lambda value: (list(value), value.axis), lambda parts, axis: Ranks(parts, axis)
)


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
            args = (meet(combine, x, axis, ranks), axis, 1, *rest)
        sizes = dict(_sizes((args, tuple(kwargs.values()))))
        if not sizes:
            return function(*args, **kwargs)
        results = []
        for numbers in numbers_along(sizes):
            named = {name: at_numbers(value, numbers) for name, value in kwargs.items()}
            results.append(function(*at_numbers(args, numbers), **named))
        return _turned(results, _axis(sizes))

    return call


def at_numbers(value: Any, numbers: Mapping[str, int]) -> Any:
    """Part of a value that the rank with these numbers has."""
    if isinstance(value, Ranks):
        return value[numbers[value.axis]]
    if isinstance(value, tuple | list):
        return type(value)([at_numbers(item, numbers) for item in value])
    return value


def with_items(value: Sequence[Any], items: Iterable[Any]) -> Any:
    """A value of the kind of another, a tuple, a list or :class:`Ranks`, with other items."""
    return Ranks(items, value.axis) if isinstance(value, Ranks) else type(value)(items)  # type: ignore[call-arg]


def on_each_rank(entry: WeightEntry, make: Callable[[WeightEntry], Any]) -> Any:
    """A weight on all ranks: one tensor where it is whole, else one for each.

    Args:
        entry: as the plan has it.
        make: the weight of an entry without shards.
    """
    places = every_rank(entry.expr)
    if places == ({},):
        return make(entry)
    return Ranks((make(entry_at_rank(entry, place)) for place in places), _axis(places[0]))


def parts_of(value: Any) -> Sequence[Any]:
    """The values of all ranks; of one that is alike on all, that one."""
    return value if isinstance(value, Ranks) else (value,)


def meet(function: Callable[[Sequence[Any]], Sequence[Any]], x: Any, axis: str, ranks: int) -> Any:
    """Results of a function on the values of the ranks that meet along an axis, one for each rank.

    A group of ranks hands over values in the order in which the layout lists it, as processes do.

    Args:
        function: takes the values and returns as many; the same object for ranks that get the same.
        x: a value, or a list of some, alike on all ranks or not.
        axis: ``tp`` or ``dp``.
        ranks: how many there are along it.
    """
    layout = layout_along({axis: ranks} | dict(_sizes(x)))
    every = [layout.numbers(rank) for rank in range(layout.world)]
    made: list[Any] = [None] * len(every)
    for members in dict.fromkeys(layout.group(axis, rank) for rank in range(len(every))):
        results = function([at_numbers(x, every[member]) for member in members])
        for member, result in zip(members, results, strict=True):
            made[member] = result
    if _same(made):
        return made[0]
    found = (_by_number(made, every, along) for along in (DP, TP, WORLD))
    return next(value for value in found if value is not None)


def _by_number(values: Sequence[Any], every: Sequence[Mapping[str, int]], axis: str) -> Any:
    """Values of ranks in the order of the ranks' numbers along an axis, which need not be theirs.

    Args:
        values: of each rank.
        every: its numbers.
        axis: of a layout.

    Returns:
        None if ranks of one number have different ones.
    """
    found: dict[int, Any] = {}
    for value, numbers in zip(values, every, strict=True):
        if found.setdefault(numbers[axis], value) is not value:
            return None
    return Ranks((found[number] for number in sorted(found)), axis)


def _same(values: Sequence[Any]) -> bool:
    return all(each is values[0] for each in values)


def _axis(sizes: Mapping[str, int]) -> str:
    """The axis of values that differ along some."""
    return next(iter(sizes)) if len(sizes) == 1 else WORLD


def _sizes(value: Any) -> Iterator[tuple[str, int]]:
    """Axes along which a value or its parts differ, and the number of ranks along each."""
    if isinstance(value, Ranks):
        yield value.axis, len(value)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _sizes(item)


def _turned(results: list[Any], axis: str) -> Any:
    """Results of ranks as a result of values of ranks."""
    first = results[0]
    if first is None:
        return None
    if isinstance(first, tuple | list):
        return type(first)([Ranks(each, axis) for each in zip(*results, strict=True)])
    return Ranks(results, axis)
