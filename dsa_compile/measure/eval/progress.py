"""Progress of a measure, reported as the share done."""

from collections.abc import Callable

Tick = Callable[[float], None]
"""Callback that takes the share done, from 0 to 1."""


def ignore(done: float) -> None:
    """Tick that does nothing."""


def part(tick: Tick, index: int, count: int) -> Tick:
    """A tick for number ``index`` of ``count`` equal parts of the work of ``tick``."""
    return lambda done: tick((index + done) / count)
