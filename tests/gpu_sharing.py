"""GPUs divided between the processes of a test run, and locks on them."""

import fcntl
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

VISIBLE = "CUDA_VISIBLE_DEVICES"


def own_first(
    environment: Mapping[str, str], worker: str, count: int, workers: int
) -> dict[str, str]:
    """Variables by which a process of pytest-xdist has a GPU of its own as its first.

    All GPUs stay visible, in an order turned by the worker's number, so that tests of several find
    them and subprocesses take the same first one. Half as many processes as GPUs have a pair each.
    To be set before CUDA is initialised.

    Args:
        environment: of the process.
        worker: its name, ``gw0`` and so on.
        count: GPUs that CUDA would show.
        workers: processes that there are.
    """
    if count < 2:
        return {}
    names = visible(environment, count)
    number = int(worker.removeprefix("gw"))
    by = number * len(names) // workers if workers < len(names) else number % len(names)
    return {VISIBLE: ",".join([*names[by:], *names[:by]])}


def visible(environment: Mapping[str, str], count: int) -> list[str]:
    """Names of the GPUs that CUDA shows, in its order: numbers or what the variable lists."""
    listed = environment.get(VISIBLE)
    return listed.split(",")[:count] if listed else [str(number) for number in range(count)]


@contextmanager
def shared(gpus: Sequence[str], *, alone: bool) -> Iterator[None]:
    """Hold GPUs beside other tests, or alone, in any process of this user.

    Args:
        gpus: their names.
        alone: no other test may have one of them.
    """
    with ExitStack() as held:
        for name in sorted(gpus):  # in one order, so that nobody waits for each other
            path = Path(tempfile.gettempdir()) / f"dsa-compile-gpu-{name}-tests-{os.getuid()}"
            lock = held.enter_context(path.open("w"))
            fcntl.flock(lock, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield
