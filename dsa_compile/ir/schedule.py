"""Tasks onto streams: list scheduling, and a model of what running side by side costs.

A kernel that streams weights or works on all processors at once leaves no room beside it: two of
those run one after the other whatever streams they are on, only that the second moves in as the
first moves out. What can be hidden is the small kernels, which are latency and little else. On an
H200, at one token, this model gave the gain of plans of a layer to within 2 µs of 220; one of
shared bandwidth promised three times what was there (docs/overlap.md).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from dsa_compile.ir.streams import MAIN

EVENT_US = 1.0
"""What a wait for another stream costs in a CUDA graph, an early launch that it prevents included.
"""
TAIL_US = 0.5
"""How much of two tasks that fill the device overlaps at the end of the first."""
MIN_GAIN_US = 0.5
"""Work stays off a side stream unless that saves so much, waits paid."""
_ASIDE = 0.02  # of a call's time, what it must save to be on a side stream


@dataclass(frozen=True)
class Task:
    """Work of one call.

    Attributes:
        us: microseconds alone.
        fills: it leaves no room for another task that does.
        after: tasks, by their place in the sequence, that must be done before; all earlier in it.
        pinned: stays on stream 0.
    """

    us: float
    fills: bool
    after: frozenset[int]
    pinned: bool = False


@dataclass(frozen=True)
class Schedule:
    """Where and when tasks run.

    Attributes:
        order: the tasks as the host issues them; on each stream they run in this order.
        streams: for each task its stream.
        us: predicted time of all.
    """

    order: tuple[int, ...]
    streams: tuple[int, ...]
    us: float


def serial(tasks: Sequence[Task]) -> Schedule:
    """Everything on stream 0, in the order given."""
    return Schedule(tuple(range(len(tasks))), (MAIN,) * len(tasks), sum(task.us for task in tasks))


def schedule(tasks: Sequence[Task], streams: int = 2) -> Schedule:
    """The fastest schedule found.

    Args:
        tasks: in an order that they could run in. The first stands for what came before, the last
            for what comes after: both are pinned, all others are after the first and before the
            last.
        streams: how many there are.
    """
    order, start = _greedy(tasks, streams)
    best = _prune(tasks, order, _improve(tasks, order, start, streams))
    if not any(best):
        return serial(tasks)
    return Schedule(tuple(gathered(tasks, order, best)), tuple(best), makespan(tasks, order, best))


def gathered(tasks: Sequence[Task], order: Sequence[int], streams: Sequence[int]) -> list[int]:
    """The same order on each stream, with few changes from one stream to another."""
    queues = {s: [t for t in reversed(order) if streams[t] == s] for s in sorted(set(streams))}
    done: list[int] = []
    current = streams[order[0]]
    while len(done) < len(order):
        ready = [s for s, q in queues.items() if q and tasks[q[-1]].after.issubset(done)]
        current = current if current in ready else ready[0]
        done.append(queues[current].pop())
    return done


def waits(
    tasks: Sequence[Task], order: Sequence[int], streams: Sequence[int]
) -> dict[int, list[int]]:
    """For each task the tasks of other streams that it must wait for by an event.

    Those that it knows to be done, from what its stream waited for before, are left out.
    """
    known: list[dict[int, int]] = [{} for _ in tasks]  # once a task is done: stream -> ticks done
    clocks: dict[int, dict[int, int]] = {}
    ticks: dict[int, int] = {}
    place = {task: index for index, task in enumerate(order)}
    needed: dict[int, list[int]] = {}
    for task in order:
        clock = clocks.setdefault(streams[task], {})
        foreign = [t for t in tasks[task].after if streams[t] != streams[task]]
        # the latest first: it may know the others to be done, never the other way round
        for other in sorted(foreign, key=place.__getitem__, reverse=True):
            if clock.get(streams[other], 0) < ticks[other]:
                needed.setdefault(task, []).append(other)
                for stream, tick in known[other].items():
                    clock[stream] = max(clock.get(stream, 0), tick)
        ticks[task] = clock[streams[task]] = clock.get(streams[task], 0) + 1
        known[task] = dict(clock)
    return needed


class _Clock:
    """When streams and the device are free, as tasks are started in the order of time."""

    def __init__(self) -> None:
        self.now = 0.0
        self._streams: dict[int, float] = {}
        self._full = 0.0, MAIN  # until when, and by which stream

    def start(self, task: Task, stream: int, ready: float) -> float:
        """The earliest start of a task whose waits are over at ``ready``."""
        start = max(self._streams.get(stream, 0.0), ready)
        until, owner = self._full
        if task.fills:
            start = max(start, until - TAIL_US if owner != stream else until)
        return start

    def run(self, task: Task, stream: int, start: float) -> float:
        """Start a task; its end."""
        end = self._streams[stream] = start + task.us
        if task.fills:
            self._full = end, stream
        self.now = max(self.now, end)
        return end


def makespan(tasks: Sequence[Task], order: Sequence[int], streams: Sequence[int]) -> float:
    """Predicted microseconds from the first task to the last."""
    needed = waits(tasks, order, streams)
    queues = {s: [t for t in reversed(order) if streams[t] == s] for s in set(streams)}
    done: dict[int, float] = {}
    clock = _Clock()
    while len(done) < len(order):
        starts = []
        for stream, queue in queues.items():
            others = needed.get(queue[-1], ()) if queue else ()
            if queue and done.keys() >= set(others):
                ready = max((done[other] for other in others), default=-EVENT_US) + EVENT_US
                starts.append((clock.start(tasks[queue[-1]], stream, ready), stream))
        start, stream = min(starts)
        task = queues[stream].pop()
        done[task] = clock.run(tasks[task], stream, start)
    return clock.now


def _urgency(tasks: Sequence[Task]) -> list[float]:
    """The longest chain of work that starts at each task."""
    rank = [task.us for task in tasks]
    for index in range(len(tasks) - 1, -1, -1):
        for before in tasks[index].after:
            rank[before] = max(rank[before], tasks[before].us + rank[index])
    return rank


def _greedy(tasks: Sequence[Task], streams: int) -> tuple[list[int], list[int]]:
    """An order and streams: always the task that can start first, the most urgent of equals.

    Each goes where it starts first.
    """
    rank = _urgency(tasks)
    clock = _Clock()
    done: dict[int, float] = {}
    chosen = [MAIN] * len(tasks)
    while len(done) < len(tasks):
        starts = []
        for task, what in enumerate(tasks):
            if task in done or not what.after.issubset(done):
                continue
            for stream in range(1 if what.pinned else streams):
                ready = [done[t] + EVENT_US * (chosen[t] != stream) for t in what.after]
                start = clock.start(what, stream, max(ready, default=0.0))
                starts.append((start, -rank[task], task, stream))
        start, _, task, stream = min(starts)
        chosen[task] = stream
        done[task] = clock.run(tasks[task], stream, start)
    return list(done), chosen


def _improve(
    tasks: Sequence[Task], order: Sequence[int], start: list[int], streams: int
) -> list[int]:
    """Change one thing at a time while the model says that it helps."""

    def cost(chosen: Sequence[int]) -> float:
        # of two that are as good as equal, the one that leaves more on stream 0
        aside = sum(task.us for task, stream in zip(tasks, chosen, strict=True) if stream != MAIN)
        return makespan(tasks, order, chosen) + _ASIDE * aside

    best, us = start, cost(start)
    while True:
        tried = [(cost(chosen), chosen) for chosen in _neighbours(tasks, order, best, streams)]
        found = min(tried, default=(us, best))
        if found[0] >= us - 1e-6:
            return best
        us, best = found


def _neighbours(
    tasks: Sequence[Task], order: Sequence[int], chosen: list[int], streams: int
) -> Iterator[list[int]]:
    """A task to another stream, a group to stream 0, or the roles of two streams exchanged."""
    for task, now in enumerate(chosen):
        for stream in range(1 if tasks[task].pinned else streams):
            if stream != now:
                yield [*chosen[:task], stream, *chosen[task + 1 :]]
    for group in _groups(tasks, chosen):
        yield [MAIN if t in group else s for t, s in enumerate(chosen)]
    for side in set(chosen) - {MAIN}:
        exchange = {MAIN: side, side: MAIN}
        for first, last in combinations(range(len(order) + 1), 2):
            other = list(chosen)
            for task in order[first:last]:
                if not tasks[task].pinned:
                    other[task] = exchange.get(chosen[task], chosen[task])
            yield other


def _prune(tasks: Sequence[Task], order: Sequence[int], chosen: list[int]) -> list[int]:
    """Take groups back to stream 0 that save less there than is worth having."""
    us = makespan(tasks, order, chosen)
    for group in sorted(_groups(tasks, chosen), key=lambda g: sum(tasks[t].us for t in g)):
        fewer = [MAIN if t in group else s for t, s in enumerate(chosen)]
        without = makespan(tasks, order, fewer)
        if without < us + MIN_GAIN_US:
            chosen, us = fewer, without
    return chosen


def _groups(tasks: Sequence[Task], chosen: Sequence[int]) -> list[set[int]]:
    """Tasks on side streams, those together that depend on one another."""
    groups: list[set[int]] = []
    for task, stream in enumerate(chosen):
        if stream == MAIN:
            continue
        joined = {task}
        apart = []
        for group in groups:
            if group & tasks[task].after:
                joined |= group
            else:
                apart.append(group)
        groups = [*apart, joined]
    return groups
