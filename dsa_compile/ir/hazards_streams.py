"""Hazards between streams: races, memory given out too early, forks and joins that are missing."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator
from itertools import combinations

from torch import fx

from dsa_compile.ir.hazard import Hazard, HazardKind
from dsa_compile.ir.region import Region
from dsa_compile.ir.storage import Memory, Storage
from dsa_compile.ir.streams import MAIN, Moment, Timeline
from dsa_compile.ops import ON_STREAM

MAX_STREAMS = 8


def stream_hazards(region: Region) -> Iterator[Hazard]:
    """Hazards of one region, the most basic first; lazily."""
    checker = _Checker(region)
    bad = list(checker.streams())
    yield from bad
    if bad:
        return  # nothing can be said of the order
    yield from checker.waits()
    yield from checker.forks_and_joins()
    yield from checker.races()
    yield from checker.lifetimes()


def early_frees(memory: Memory, time: Timeline) -> Iterator[tuple[Storage, int, Moment, Moment]]:
    """Storages whose memory may be given out again while in use.

    The host returns memory to the pool of the stream that it was made on, at once after the last
    node that holds it; the next call on that stream may take it.

    Yields:
        The storage, the stream it was made on, a use on another stream, and the first call on the
        first stream after the release, which does not wait for that use. The region's end counts as
        a call on stream 0. On a side stream the next region's first call waits for stream 0, which
        by then has waited for everything.
    """
    homes: dict[Storage, Moment] = {}
    users: dict[Storage, list[Moment]] = defaultdict(list)
    for moment in time.moments[:-1]:
        uses = memory.uses[moment.node]
        homes |= dict.fromkeys(uses.makes, moment)
        for storage in uses.touches():
            users[storage].append(moment)
    streams = {made.stream for made in homes.values()}
    calls = {stream: list(time.of_stream(stream)) for stream in streams}
    for storage, made in homes.items():
        released = memory.released.get(storage)
        if released is None:
            continue
        later = bisect_right(calls[made.stream], released, key=lambda m: m.index)
        if later == len(calls[made.stream]):
            continue
        reuse = calls[made.stream][later]
        for use in users[storage]:
            if use.stream != made.stream and not reuse.follows(use):
                yield storage, made.stream, use, reuse


class _Checker:
    def __init__(self, region: Region) -> None:
        self.region = region
        self.memory = Memory(region.graph)
        self.time = Timeline(region.graph, self.memory.uses)

    def _hazard(
        self, kind: HazardKind, first: fx.Node, second: fx.Node, problem: str, remedy: str
    ) -> Hazard:
        return Hazard.between(kind, self.region.name, (first, second), problem, remedy)

    def streams(self) -> Iterator[Hazard]:
        output = self.region.graph.output_node()
        last = None
        for node in self.region.graph.nodes:
            if node.target is ON_STREAM:
                last = node
                if not 0 <= node.args[0] < MAX_STREAMS:
                    yield self._hazard(
                        HazardKind.NO_STREAM,
                        node,
                        node,
                        f"{node.name} chooses stream {node.args[0]}",
                        f"streams are numbered from 0 to {MAX_STREAMS - 1}",
                    )
        if last is not None and last.args[0] != MAIN:
            yield self._hazard(
                HazardKind.NOT_JOINED,
                last,
                output,
                f"the region ends on stream {last.args[0]}, which {last.name} chose",
                f"add on_stream({MAIN}) at the end",
            )

    def waits(self) -> Iterator[Hazard]:
        for wait, recorded in self.time.waits.items():
            stream = self.time.streams[wait]
            if recorded is None:
                yield self._hazard(
                    HazardKind.NOT_RECORDED,
                    wait,
                    wait,
                    f"{wait.name} waits on stream {stream} for event {wait.args[0]}, which no call "
                    "before it records",
                    f"add record_event({wait.args[0]}) before {wait.name}",
                )
            elif recorded.after is None and not recorded.known.get(MAIN):
                yield self._hazard(
                    HazardKind.NOT_FORKED,
                    recorded.node,
                    wait,
                    f"{recorded.node.name} records on stream {recorded.stream} before that stream "
                    "has waited for stream 0",
                    f"add a wait on stream {recorded.stream} for an event of stream 0 before it",
                )

    def forks_and_joins(self) -> Iterator[Hazard]:
        end = self.time.moments[-1]
        sides = sorted({moment.stream for moment in self.time.moments} - {MAIN})
        for stream in sides:
            moments = list(self.time.of_stream(stream))
            first, last = moments[0], moments[-1]
            if not first.known.get(MAIN):
                yield self._hazard(
                    HazardKind.NOT_FORKED,
                    first.node,
                    first.node,
                    f"{first.node.name} on stream {stream} does not wait for stream 0",
                    f"record an event on stream 0 and wait for it before {first.node.name}",
                )
            if not end.follows(last):
                yield self._hazard(
                    HazardKind.NOT_JOINED,
                    last.node,
                    end.node,
                    f"stream 0 does not wait for {last.node.name} on stream {stream}",
                    f"record an event after {last.node.name} and wait for it on stream 0 "
                    "before the end",
                )

    def races(self) -> Iterator[Hazard]:
        if len({moment.stream for moment in self.time.moments}) == 1:
            return
        for first, second in combinations(self.time.moments[:-1], 2):
            if first.stream == second.stream or second.follows(first):
                continue
            shared = self._conflict(first, second)
            if shared is not None:
                yield self._hazard(
                    HazardKind.RACE,
                    first.node,
                    second.node,
                    f"{first.node.name} on stream {first.stream} and {second.node.name} on stream "
                    f"{second.stream} use {shared.node.name}, at least one writes it, and nothing "
                    "orders them",
                    f"record an event after {first.node.name} and wait for it on stream "
                    f"{second.stream} before {second.node.name}",
                )

    def _conflict(self, first: Moment, second: Moment) -> Storage | None:
        a, b = (self.memory.uses[moment.node] for moment in (first, second))
        shared = (a.writes.union(a.makes) & b.touches()) | (a.touches() & b.writes)
        return min(shared, key=lambda s: (s.node.name, s.entry), default=None)

    def lifetimes(self) -> Iterator[Hazard]:
        for storage, home, use, reuse in early_frees(self.memory, self.time):
            yield self._hazard(
                HazardKind.FREED_EARLY,
                use.node,
                reuse.node,
                f"{storage.node.name} is made on stream {home} and used by {use.node.name} on "
                f"stream {use.stream}; the host drops it before {reuse.node.name}, which may get "
                "its memory, without waiting",
                f"let stream {home} wait for {use.node.name} before {reuse.node.name}, or add "
                f"keep_alive of {storage.node.name} after such a wait",
            )
        homes = {moment.node: moment.stream for moment in self.time.moments}
        output = self.region.graph.output_node()
        for storage in sorted(self.memory.results):
            if homes.get(storage.node, MAIN) != MAIN:
                yield self._hazard(
                    HazardKind.RESULT,
                    storage.node,
                    output,
                    f"{storage.node.name} is made on stream {homes[storage.node]} and is a result: "
                    "its memory would be given out again on that stream",
                    f"make it on stream {MAIN}",
                )
