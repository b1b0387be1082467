"""Jobs that this process and a forked one share: whichever is free takes the next."""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from dsa_compile.verify.execution.forked import Forked

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


@contextlib.contextmanager
def shared_jobs(
    jobs: Sequence[Callable[[], T]], ends: Callable[[T], bool]
) -> Iterator[Callable[[], list[T]]]:
    """Let a forked process begin with jobs at once, as :class:`Forked` does, and help it later.

    Args:
        jobs: at most 256, in order; what each changes in its process is lost to the other.
        ends: whether a result makes the jobs behind its own needless.

    Yields:
        A function that runs what is left here, waits for the rest, and returns the results up to
        the first that ends, in the order of the jobs. It raises what a job raised.
    """
    # A byte for each job: whoever reads it runs that job, and the end of the pipe is the end.
    left, numbers = os.pipe()
    os.write(numbers, bytes(range(len(jobs))))
    os.close(numbers)

    def run() -> dict[int, T]:
        made = {}
        while taken := os.read(left, 1):
            number = taken[0]
            made[number] = jobs[number]()
            if ends(made[number]):
                os.read(left, len(jobs))  # those before it are taken already
        return made

    def results() -> list[T]:
        made = run()
        made |= forked.result()
        # a process that brings nothing back has taken jobs with it
        every = [
            lambda n=number, job=job: made[n] if n in made else job()
            for number, job in enumerate(jobs)
        ]
        return results_in_turn(every, ends)

    try:
        with Forked(run) as forked:
            yield results
    finally:
        os.close(left)
