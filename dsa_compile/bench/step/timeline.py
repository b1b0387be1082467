"""Traces of a step: which op launched each kernel, and what each adds to the step's time.

Kernels overlap: one that may start early waits inside, and side streams run beside the main one. A
kernel's share is therefore the time it adds to the step, from the latest end of those that started
before it to its own end; shares and gaps add up to the step.
"""

from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

_LAUNCHES = ("cuda_runtime", "cuda_driver")
_DEVICE = ("kernel", "gpu_memset", "gpu_memcpy")
OTHER = "other"

Event = dict[str, Any]


@dataclass(frozen=True)
class Work:
    """A kernel, fill or copy on the device; microseconds."""

    name: str
    start: float
    end: float
    label: str = OTHER


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
    labels: dict[int, tuple[float, str]] = {}
    for event in whole:
        if event.get("cat") in _LAUNCHES and "correlation" in event.get("args", {}):
            index = bisect_right(starts, event["ts"]) - 1
            inside = index >= 0 and event["ts"] <= spans[index][1]
            label = spans[index][2] if inside else OTHER
            labels[event["args"]["correlation"]] = event["ts"], label
    found = []
    for event in whole:
        if event.get("cat") in _DEVICE:
            when, label = labels.get(event["args"].get("correlation", -1), (event["ts"], OTHER))
            found.append((when, _work(event, label)))
    return [work for _, work in sorted(found, key=lambda pair: pair[0])]


def on_device(events: Iterable[Event]) -> list[Work]:
    """The device's work in the order of its start."""
    found = [_work(event, OTHER) for event in events if event.get("cat") in _DEVICE]
    return sorted(found, key=lambda work: work.start)


def _work(event: Event, label: str) -> Work:
    return Work(event["name"], event["ts"], event["ts"] + event["dur"], label)


def relabel(replayed: Sequence[Work], known: Sequence[Work]) -> list[Work]:
    """Labels for the work of a graph, from the same step run without one.

    The i-th kernel of a name there is the i-th of that name here.
    """
    labels: dict[str, deque[str]] = defaultdict(deque)
    for work in known:
        labels[work.name].append(work.label)
    return [
        Work(
            work.name,
            work.start,
            work.end,
            labels[work.name].popleft() if labels[work.name] else OTHER,
        )
        for work in replayed
    ]


@dataclass
class Share:
    """What one label adds to a step.

    Attributes:
        us: microseconds.
        launches: kernels, fills and copies.
        names: of its kernels.
    """

    us: float
    launches: float
    names: list[str]


def shares(step: Sequence[Work]) -> tuple[dict[str, Share], float]:
    """What each label adds to one step, and the gaps in which nothing ran.

    Args:
        step: in any order.

    Returns:
        By label, the largest first; microseconds of gaps.
    """
    found: dict[str, Share] = {}
    gaps, reached = 0.0, min((work.start for work in step), default=0.0)
    for work in sorted(step, key=lambda work: work.start):
        share = found.setdefault(work.label, Share(0.0, 0, []))
        share.us += max(0.0, work.end - max(work.start, reached))
        share.launches += 1
        if work.name not in share.names:
            share.names.append(work.name)
        gaps += max(0.0, work.start - reached)
        reached = max(reached, work.end)
    return dict(sorted(found.items(), key=lambda item: -item[1].us)), gaps


def split(work: Sequence[Work], count: int) -> list[list[Work]]:
    """Cut a sequence of equal steps into them.

    Raises:
        ValueError: it does not consist of so many equal steps.
    """
    size, rest = divmod(len(work), count)
    if rest:
        raise ValueError(f"{len(work)} kernels are not {count} equal steps")
    return [list(work[i * size : (i + 1) * size]) for i in range(count)]
