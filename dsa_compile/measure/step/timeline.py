"""Traces of a step: which op launched each kernel, and what each adds to the step's time.

Kernels overlap: one that may start early waits inside, and side streams run beside the main one. A
kernel's share is therefore the time it adds to the step, from the latest end of those that started
before it to its own end; shares and gaps add up to the step.
"""

import math
from bisect import bisect_right
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

_LAUNCHES = ("cuda_runtime", "cuda_driver")
_DEVICE = ("kernel", "gpu_memset", "gpu_memcpy")
OTHER = "other"

Event = dict[str, Any]


@dataclass(frozen=True)
class Work:
    """A kernel, fill or copy on the device; microseconds.

    Attributes:
        name: of the kernel.
        start: of its first block.
        end: of its last.
        label: the range that launched it.
        span: number of that range among all, in time; -1 for none.
        blocks: of its grid; 0 where the trace does not tell.
    """

    name: str
    start: float
    end: float
    label: str = OTHER
    span: int = -1
    blocks: int = 0


def launched(events: Iterable[Event], ranges: frozenset[str]) -> list[Work]:
    """The device's work in the order in which the host launched it, labelled by range.

    Args:
        events: of a Chrome trace.
        ranges: names of the ranges that are labels; they do not overlap.
    """
    whole = [event for event in events if event.get("ph") == "X"]
    spans = sorted(
        (event["ts"], event["ts"] + event["dur"], event["name"])
        for event in whole
        if event.get("cat") == "user_annotation" and event["name"] in ranges
    )
    starts = [start for start, _, _ in spans]
    labels: dict[int, tuple[float, str, int]] = {}
    for event in whole:
        if event.get("cat") in _LAUNCHES and "correlation" in event.get("args", {}):
            index = bisect_right(starts, event["ts"]) - 1
            inside = index >= 0 and event["ts"] <= spans[index][1]
            label, span = (spans[index][2], index) if inside else (OTHER, -1)
            labels[event["args"]["correlation"]] = event["ts"], label, span
    found = []
    for event in whole:
        if event.get("cat") in _DEVICE:
            unknown = event["ts"], OTHER, -1
            when, label, span = labels.get(event["args"].get("correlation", -1), unknown)
            found.append((when, _work(event, label, span)))
    return [work for _, work in sorted(found, key=lambda pair: pair[0])]


def on_device(events: Iterable[Event]) -> list[Work]:
    """The device's work in the order of its start."""
    found = [_work(event, OTHER) for event in events if event.get("cat") in _DEVICE]
    return sorted(found, key=lambda work: work.start)


def _work(event: Event, label: str, span: int = -1) -> Work:
    blocks = math.prod(event.get("args", {}).get("grid", (0,)))
    return Work(event["name"], event["ts"], event["ts"] + event["dur"], label, span, blocks)


def relabel(replayed: Sequence[Work], known: Sequence[Work]) -> list[Work]:
    """Labels for the work of a graph, from the same step run without one.

    The i-th kernel of a name there is the i-th of that name here; of a name and a number of blocks,
    where all labelled ones are found by these, for on two streams they may start in another order.
    """
    there = Counter(map(_launch, replayed))
    wanted = Counter(_launch(work) for work in known if work.label != OTHER)
    key = _launch if all(there[launch] == count for launch, count in wanted.items()) else _name
    labels: dict[object, deque[Work]] = defaultdict(deque)
    for work in known:
        labels[key(work)].append(work)
    found = []
    for work in replayed:
        given = labels[key(work)]
        same = given.popleft() if given else Work("", 0.0, 0.0)
        found.append(replace(work, label=same.label, span=same.span))
    return found


def _launch(work: Work) -> object:
    return work.name, work.blocks


def _name(work: Work) -> object:
    return work.name


@dataclass
class Share:
    """Time that one label adds to a step.

    Attributes:
        us: microseconds.
        launches: kernels, fills and copies.
        names: of its kernels.
    """

    us: float
    launches: float
    names: list[str]


def shares(step: Sequence[Work]) -> tuple[dict[str, Share], float]:
    """Time that each label adds to one step, and the gaps in which nothing ran.

    Args:
        step: in any order.

    Returns:
        By label, the largest first; microseconds of gaps.
    """
    found: dict[str, Share] = {}
    gaps = 0.0
    for work, gap, added in lengthening(step):
        share = found.setdefault(work.label, Share(0.0, 0, []))
        share.us += added
        share.launches += 1
        if work.name not in share.names:
            share.names.append(work.name)
        gaps += gap
    return dict(sorted(found.items(), key=lambda item: -item[1].us)), gaps


def lengthening(step: Sequence[Work]) -> Iterator[tuple[Work, float, float]]:
    """Each kernel with the gap before it, in which nothing ran, and what it adds to the step.

    Args:
        step: in any order; results are in that of the starts.
    """
    reached = min((work.start for work in step), default=0.0)
    for work in sorted(step, key=lambda work: work.start):
        yield work, max(0.0, work.start - reached), max(0.0, work.end - max(work.start, reached))
        reached = max(reached, work.end)


def split(work: Sequence[Work], count: int) -> list[list[Work]]:
    """Cut a sequence of equal steps into them.

    Raises:
        ValueError: it does not consist of so many equal steps.
    """
    size, rest = divmod(len(work), count)
    if rest:
        raise ValueError(f"{len(work)} kernels are not {count} equal steps")
    return [list(work[i * size : (i + 1) * size]) for i in range(count)]
