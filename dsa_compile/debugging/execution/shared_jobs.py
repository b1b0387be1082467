"""Jobs that this process and a forked one share: whichever is free takes the next."""

import os
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Generic, Self, TypeVar

from dsa_compile.debugging.execution.forked import Forked

T = TypeVar("T")


def results_in_turn(jobs: Sequence[Callable[[], T]], ends: Callable[[T], bool]) -> list[T]:
    """Results of jobs run one after the other here.

    Args:
        jobs: in order.
        ends: whether a result makes the jobs behind its own needless.
    """
    results = []
    for job in jobs:
        results.append(job())
        if ends(results[-1]):
            break
    return results


class SharedJobs(Generic[T]):
    """Jobs that a forked process begins with at once, and this one helps with later.

    As a context it has the process: see :class:`Forked`.

    Args:
        jobs: at most 256, in order; what each changes in its process is lost to the other.
        ends: whether a result makes the jobs behind its own needless.
    """

    def __init__(self, jobs: Sequence[Callable[[], T]], ends: Callable[[T], bool]) -> None:
        self._jobs, self._ends = jobs, ends
        # A byte for each job: whoever reads it runs that job, and the end of the pipe is the end.
        self._left, numbers = os.pipe()
        os.write(numbers, bytes(range(len(jobs))))
        os.close(numbers)
        self._forked = Forked(self._run)

    def results(self) -> list[T]:
        """Run what is left here, and wait for the rest.

        Returns:
            The results up to the first that ends, in the order of the jobs.

        Raises:
            Exception: the one that a job raised.
        """
        made = self._run()
        made |= self._forked.result()
        # a process that brings nothing back has taken jobs with it
        every = [
            lambda n=number, job=job: made[n] if n in made else job()
            for number, job in enumerate(self._jobs)
        ]
        return results_in_turn(every, self._ends)

    def _run(self) -> dict[int, T]:
        made = {}
        while taken := os.read(self._left, 1):
            number = taken[0]
            made[number] = self._jobs[number]()
            if self._ends(made[number]):
                os.read(self._left, len(self._jobs))  # those before it are taken already
        return made

    def __enter__(self) -> Self:
        """Leave a core to the process."""
        self._forked.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop the process."""
        self._forked.__exit__(kind, error, trace)
        os.close(self._left)
