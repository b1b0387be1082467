"""Tasks onto streams: list scheduling, and a model of what running side by side costs.

Two kernels at a time do not make twice the throughput. Each task has the time that it takes alone
and its load, the share of the device's throughput (bandwidth or arithmetic, whichever is scarcer)
that it uses in that time. Tasks that run together and ask for more than all of it are slowed down
in proportion. A task that waits for another stream starts some time after what it waits for.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from dsa_compile.ir.streams import MAIN

EVENT_US = 1.5
"""What a wait for another stream costs in a CUDA graph."""
MIN_GAIN_US = 0.5
"""Work stays off a side stream unless that saves so much, waits paid."""

_ASIDE = 0.02  # of a call's time, what it must save to be on a side stream


@dataclass(frozen=True)
class Task:
    """Work of one call.

    Attributes:
        us: microseconds alone.
        load: share of the device that it uses meanwhile, from 0 to 1.
        after: tasks, by their place in the sequence, that must be done before; all earlier in it.
        pinned: stays on stream 0.
    """

    us: float
    load: float
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


def makespan(tasks: Sequence[Task], order: Sequence[int], streams: Sequence[int]) -> float:
    """Predicted microseconds from the first task to the last."""
    needed = waits(tasks, order, streams)
    queues = {s: [t for t in reversed(order) if streams[t] == s] for s in set(streams)}
    done: set[int] = set()
    running: dict[int, tuple[int, list[list[float]]]] = {}  # stream -> task, its phases left
    now = 0.0
    while True:
        for stream, queue in queues.items():
            if stream not in running and queue and done.issuperset(needed.get(queue[-1], ())):
                task = queue.pop()
                wait = [[EVENT_US, 0.0]] if task in needed else []
                running[stream] = (task, [*wait, [tasks[task].us, tasks[task].load]])
        if not running:
            return now
        asked = sum(phases[0][1] for _, phases in running.values())
        slower = max(1.0, asked)
        step = min(left * (slower if load else 1.0) for _, ((left, load), *_) in running.values())
        now += step
        for stream, (task, phases) in list(running.items()):
            phase = phases[0]
            phase[0] -= step / (slower if phase[1] else 1.0)
            if phase[0] <= 1e-9:
                del phases[0]
                if not phases:
                    done.add(task)
                    del running[stream]


def _urgency(tasks: Sequence[Task]) -> list[float]:
    """The longest chain of work that starts at each task."""
    rank = [task.us for task in tasks]
    for index in range(len(tasks) - 1, -1, -1):
        for before in tasks[index].after:
            rank[before] = max(rank[before], tasks[before].us + rank[index])
    return rank


def _greedy(tasks: Sequence[Task], streams: int) -> tuple[list[int], list[int]]:
    """An order and streams: always the task that can start first, the most urgent of equals.

    Each goes where it starts first, were the device without limits.
    """
    rank = _urgency(tasks)
    free = [0.0] * streams
    done: dict[int, float] = {}
    chosen = [MAIN] * len(tasks)
    while len(done) < len(tasks):
        starts = []
        for task, what in enumerate(tasks):
            if task in done or not what.after.issubset(done):
                continue
            for stream in range(1 if what.pinned else streams):
                ready = [done[t] + EVENT_US * (chosen[t] != stream) for t in what.after]
                starts.append((max([free[stream], *ready]), -rank[task], task, stream))
        start, _, task, stream = min(starts)
        chosen[task] = stream
        free[stream] = done[task] = start + tasks[task].us
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
