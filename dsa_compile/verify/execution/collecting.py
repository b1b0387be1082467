"""Garbage collection of new objects alone, beside a compilation that has millions."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def new_objects_alone() -> Iterator[None]:
    """Let the collector go through what is made from here on: each engine that closes calls it.

    A process that has set objects aside for its whole life keeps these aside as well.
    """
    aside = gc.get_freeze_count() > 0
    gc.freeze()
    try:
        yield
    finally:
        if not aside:
            gc.unfreeze()
