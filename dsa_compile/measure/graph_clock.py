"""Time of CUDA graph replays that the host's pace cannot lengthen.

A replay is timed behind a kernel that waits. If the GPU is still waiting once the host has queued
the events and the replay, then the time between the events is the GPU's alone; if not, the wait is
doubled and the replay timed again. A graph has so many calls that its start-up does not show: as
many as the time of a first graph suggests, then doubled until a call takes as long as before.

Nothing here needs a GPU: :mod:`dsa_compile.measure.timing` brings the one that is timed.
"""

import statistics
from collections.abc import Callable

Work = Callable[[], object]
"""Queues something on the GPU."""

Attempt = Callable[[Work, int], float | None]
"""Microseconds of work queued behind a wait of so many cycles; None if the wait ended too soon."""

_FIRST_WAIT = 1 << 18  # cycles, some 0.15 ms
_LONGEST_WAIT = 1 << 33  # seconds: the host does not get on at all
_WARM_UPS = 3
_TRIED_REPLAYS = 7  # of a graph that is looked at for its size

_GRAPH_US = 400.0  # a replay's start-up, a few microseconds, is below a hundredth of it
_MOST_CALLS = 1024  # of a graph: capturing takes the host some 10 to 100 µs a call
_STEADY = 0.02  # share by which a call may differ in a graph of twice as many


class QueuedClock:
    """Times what runs once the host has queued it all.

    Args:
        attempt: one measurement.
    """

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt
        self._wait = _FIRST_WAIT

    def us(self, work: Work) -> float:
        """Microseconds of the work.

        Raises:
            RuntimeError: the host cannot queue the work within seconds.
        """
        while (us := self._attempt(work, self._wait)) is None:
            if self._wait >= _LONGEST_WAIT:
                raise RuntimeError("the host takes seconds to queue one replay: nothing to time")
            self._wait *= 2
        return us

    def median_us(self, work: Work, times: int) -> float:
        """Median microseconds, after a few times that are not counted."""
        for _ in range(_WARM_UPS):
            work()
        return statistics.median(self.us(work) for _ in range(times))


def call_us(capture: Callable[[int], Work], calls: int, clock: QueuedClock, replays: int) -> float:
    """Median microseconds of one call.

    Args:
        capture: makes a graph of so many rounds of all calls; returns its replay.
        calls: how many a round has.
        clock: times a replay.
        replays: of the graph whose time counts.
    """
    rounds = steady_rounds(
        lambda n: clock.median_us(capture(n), _TRIED_REPLAYS), max(1, _MOST_CALLS // calls)
    )
    return clock.median_us(capture(rounds), replays) / (rounds * calls)


def steady_rounds(graph_us: Callable[[int], float], most: int) -> int:
    """Number of rounds that a graph needs so that more would not change the time of a call.

    Args:
        graph_us: time of a graph of so many rounds.
        most: rounds that a graph may have.
    """
    us = graph_us(1)
    rounds = min(most, max(1, round(_GRAPH_US / max(us, 1.0))))
    if rounds > 1:
        us = graph_us(rounds)
    while 2 * rounds <= most:
        twice = graph_us(2 * rounds)
        steady = abs(twice - 2 * us) <= _STEADY * twice
        if steady and us >= _GRAPH_US:
            break
        rounds, us = 2 * rounds, twice
    return rounds
