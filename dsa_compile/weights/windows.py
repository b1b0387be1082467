"""Windows: the part of a parameter that an expression needs, found without reading the rest."""

import math
from collections.abc import Iterator, Sequence
from itertools import product

Window = tuple[slice, ...]
"""Start and stop along each dimension of a tensor; ``()`` is all of it, as in indexing."""


def bounded(window: Window, shape: Sequence[int]) -> Window:
    """Window with a slice for every dimension."""
    return window or tuple(slice(0, size) for size in shape)


def sizes(window: Window) -> tuple[int, ...]:
    """Shape of what a window shows."""
    return tuple(part.stop - part.start for part in window)


def replaced(window: Window, dim: int, start: int, stop: int) -> Window:
    """Window with other ends along one dimension."""
    return (*window[:dim], slice(start, stop), *window[dim + 1 :])


def through_reshape(
    source: Sequence[int], target: Sequence[int], window: Window
) -> Iterator[tuple[Window, Window]] | None:
    """Windows of a tensor that together make a window of its reshaped form.

    Args:
        source: shape of the tensor.
        target: its shape after the reshape.
        window: of the reshaped tensor, with a slice for every dimension.

    Returns:
        Pairs of a place within the window, relative to its start, and the window of the source that
        goes there in row-major order; None where the parts are no windows of the source.
    """
    choices = []
    for (first, last), (begin, end) in _groups(source, target):
        found = _pieces(source[first:last], target[begin:end], window[begin:end])
        if found is None:
            return None
        choices.append(found)
    return (
        (sum((place for place, _ in pieces), ()), sum((inner for _, inner in pieces), ()))
        for pieces in product(*choices)
    )


def _groups(
    source: Sequence[int], target: Sequence[int]
) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Shortest runs of dimensions on both sides with equally many elements."""
    i = j = 0
    while i < len(source) or j < len(target):
        first, begin = i, j
        i, j = min(i + 1, len(source)), min(j + 1, len(target))
        while (ours := math.prod(source[first:i])) != (theirs := math.prod(target[begin:j])):
            i, j = (i + 1, j) if ours < theirs else (i, j + 1)
        yield (first, i), (begin, j)


def _pieces(
    source: Sequence[int], target: Sequence[int], window: Window
) -> list[tuple[Window, Window]] | None:
    """Pieces of one group: places in the window, and the windows of the source that go there."""
    counts = sizes(window)
    if counts == tuple(target):
        return [(bounded((), target), bounded((), source))]
    if len(source) != 1:
        return None
    # the dimensions after this one are whole, so a slice along it is a run of the source
    split = max(dim for dim, size in enumerate(target) if counts[dim] != size)
    stride = math.prod(target[split + 1 :])
    found: list[tuple[Window, Window]] = []
    for index in product(*(range(count) for count in counts[:split])):
        row = 0
        for dim, number in enumerate(index):
            row = row * target[dim] + window[dim].start + number
        start = (row * target[split] + window[split].start) * stride
        place = (*(slice(i, i + 1) for i in index), *bounded((), counts[split:]))
        found.append((place, (slice(start, start + counts[split] * stride),)))
    return found
