"""A weight that is made when a call takes it: most calls of a stage are known, and not run.

Experts of a released layer are gigabytes in exact arithmetic, and hardly any pass rewrites them.
"""

from collections.abc import Callable, Hashable, Iterable
from typing import Any


class DeferredWeight:
    """Stands for a weight among the inputs of a graph.

    Args:
        name: what tells it from others: how it is made, and of what.
        make: makes it, on all ranks.
    """

    def __init__(self, name: Hashable, make: Callable[[], Any]) -> None:
        self.name = name
        self._make = make
        self._made: Any = None

    def get(self) -> Any:
        """The weight, made where it is not there."""
        if self._made is None:
            self._made = self._make()
        return self._made

    def release(self) -> None:
        """Let go of the weight; it is made again if it is wanted again."""
        self._made = None


def undeferred(value: Any) -> Any:
    """A value, or the weight that it stands for."""
    return value.get() if type(value) is DeferredWeight else value


def release(weights: Iterable[DeferredWeight]) -> None:
    """Let go of weights that no call of a stage will take any more."""
    for weight in weights:
        weight.release()
