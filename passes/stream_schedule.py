"""List scheduling of tasks onto streams, with a cost model of kernels that run side by side.

A kernel that streams weights holds the shared memory of all processors until it ends: another of
its size waits, whatever stream it is on. Two streams hide small kernels beside large ones, and
large ones that start together, as far as the memory's bandwidth goes. This model finds the best of
the plans for a layer that were measured on an H200 (docs/overlap.md); it promises up to 4 µs too
much.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from dsa_compile.ir.streams import MAIN

EVENT_US = 1.2
"""Cost of a wait for another stream in a CUDA graph: a kernel that waits is not launched early,
while the one before it drains.
"""
MIN_GAIN_US = 0.3
"""Work stays off a side stream unless that is worth so much, waits paid."""
_MOMENT = 1e-9
# Of plans that are as good as equal, the one whose calls are done earlier, which the model's errors
# hurt less, and of those the one that leaves more on stream 0.
_EARLY = 0.03  # for every microsecond that a call is done earlier
_ASIDE = 0.02  # for every microsecond of work on a side stream


_Plan = tuple[list[int], list[int]]  # the order of tasks; the stream of each


@dataclass(frozen=True)
class Task:
    """Work of one call.

    Attributes:
        us: microseconds alone.
        fills: it leaves no room for another task that does to start while it runs.
        load: share of the memory's or the matrix units' throughput that it uses alone.
        after: tasks, by their place in the sequence, that must be done before; all earlier in it.
        pinned: stays on stream 0.
    """

    us: float
    fills: bool
    load: float
    after: frozenset[int]
    pinned: bool = False


@dataclass(frozen=True)
class Schedule:
    """Streams and order in which tasks run.

    Attributes:
        order: the tasks as the host issues them; on each stream they run in this order.
        streams: for each task its stream.
        us: predicted time of all.
    """

    order: tuple[int, ...]
    streams: tuple[int, ...]
    us: float


def serial(tasks: Sequence[Task]) -> Schedule:
    """Schedule of everything on stream 0, in the order given."""
    return Schedule(tuple(range(len(tasks))), (MAIN,) * len(tasks), sum(task.us for task in tasks))


def schedule(tasks: Sequence[Task], streams: int = 2) -> Schedule:
    """The fastest schedule found.

    Args:
        tasks: in an order that they could run in. The first stands for what came before, the last
            for what comes after: both are pinned, all others are after the first and before the
            last.
        streams: how many there are.
    """
    order, best = _prune(tasks, _improve(tasks, _greedy(tasks, streams), streams))
    if not any(best):
        return serial(tasks)
    return Schedule(tuple(gathered(tasks, order, best)), tuple(best), makespan(tasks, order, best))


def gathered(tasks: Sequence[Task], order: Sequence[int], streams: Sequence[int]) -> list[int]:
    """Order with few changes from one stream to another; on each stream it is the one given."""
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
    """Tasks of other streams that each task must wait for by an event.

    Tasks that it knows to be done, from what its stream waited for before, are left out.
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


@dataclass
class _Running:
    """A task that runs: microseconds left, were it alone, and when it started."""

    task: int
    left: float
    since: float


def makespan(tasks: Sequence[Task], order: Sequence[int], streams: Sequence[int]) -> float:
    """Predicted microseconds from the first task to the last."""
    return max(ends(tasks, order, streams).values())


def ends(tasks: Sequence[Task], order: Sequence[int], streams: Sequence[int]) -> dict[int, float]:
    """End of each task, in microseconds from the start, as the model has it."""
    needed = waits(tasks, order, streams)
    queues = {s: [t for t in reversed(order) if streams[t] == s] for s in set(streams)}
    running: dict[int, _Running] = {}
    idle = dict.fromkeys(queues, 0.0)  # since when each stream has had nothing to do
    done: dict[int, float] = {}
    now = 0.0
    while len(done) < len(order):
        later = []
        for stream, queue in queues.items():
            if stream in running or not queue or not done.keys() >= set(needed.get(queue[-1], ())):
                continue
            task = queue[-1]
            others = [done[other] + EVENT_US for other in needed.get(task, ())]
            ready = max([idle[stream], *others])
            held = any(tasks[r.task].fills and r.since < now for r in running.values())
            if ready > now + _MOMENT:
                later.append(ready)
            elif not (tasks[task].fills and held):
                running[stream] = _Running(queue.pop(), tasks[task].us, now)
        asked = max(1.0, sum(tasks[r.task].load for r in running.values()))
        changes = [*later, *(now + r.left * asked for r in running.values())]
        step = min(changes) - now
        now += step
        for stream, one in list(running.items()):
            one.left -= step / asked
            if one.left <= _MOMENT:
                done[one.task] = idle[stream] = now
                del running[stream]
    return done


def _urgency(tasks: Sequence[Task]) -> list[float]:
    """The longest chain of work that starts at each task."""
    rank = [task.us for task in tasks]
    for index in range(len(tasks) - 1, -1, -1):
        for before in tasks[index].after:
            rank[before] = max(rank[before], tasks[before].us + rank[index])
    return rank


def _greedy(tasks: Sequence[Task], streams: int) -> _Plan:
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


def _improve(tasks: Sequence[Task], start: _Plan, streams: int) -> _Plan:
    """Change one thing at a time while the model says that it helps."""
    known: dict[tuple[tuple[int, ...], ...], float] = {}

    def cost(plan: _Plan) -> float:
        order, chosen = plan
        # what streams do among each other follows from the tasks: orders of many plans differ in
        # nothing else
        queues = tuple(tuple(t for t in order if chosen[t] == s) for s in range(streams))
        if queues not in known:
            known[queues] = _cost(tasks, plan)
        return known[queues]

    best, us = start, cost(start)
    while True:
        tried = ((cost(plan), plan) for plan in _neighbours(tasks, best, streams))
        found = min(tried, default=(us, best))
        if found[0] >= us - _MOMENT:
            return best
        us, best = found


def _neighbours(tasks: Sequence[Task], plan: _Plan, streams: int) -> Iterator[_Plan]:
    """A task elsewhere, a group to stream 0, or the roles of two streams exchanged for a while."""
    order, chosen = plan
    for task in order:
        others = [t for t in order if t != task]
        first = max((others.index(t) + 1 for t in tasks[task].after), default=0)
        last = min((i for i, t in enumerate(others) if task in tasks[t].after), default=first)
        for stream in range(1 if tasks[task].pinned else streams):
            moved = [*chosen[:task], stream, *chosen[task + 1 :]]
            for place in range(first, last + 1):
                yield [*others[:place], task, *others[place:]], moved
    for group in _groups(tasks, chosen):
        yield order, [MAIN if t in group else s for t, s in enumerate(chosen)]
    for side in set(chosen) - {MAIN}:
        exchange = {MAIN: side, side: MAIN}
        for begin, end in combinations(range(len(order) + 1), 2):
            other = list(chosen)
            for task in order[begin:end]:
                if not tasks[task].pinned:
                    other[task] = exchange.get(chosen[task], chosen[task])
            yield order, other


def _cost(tasks: Sequence[Task], plan: _Plan) -> float:
    """Cost that is minimised: the time of all, and a little for a robust and simple plan."""
    done = ends(tasks, *plan)
    aside = sum(task.us for task, stream in zip(tasks, plan[1], strict=True) if stream != MAIN)
    return max(done.values()) + _EARLY * sum(done.values()) + _ASIDE * aside


def _prune(tasks: Sequence[Task], plan: _Plan) -> _Plan:
    """Take groups back to stream 0 that save less than is worth having."""
    for group in sorted(_groups(tasks, plan[1]), key=lambda g: sum(tasks[t].us for t in g)):
        fewer = plan[0], [MAIN if t in group else s for t, s in enumerate(plan[1])]
        if _cost(tasks, fewer) < _cost(tasks, plan) + MIN_GAIN_US:
            plan = fewer
    return plan


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
