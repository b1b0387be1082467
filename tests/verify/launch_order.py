"""Work that nothing orders: vector clocks over what was enqueued.

A stream's clock has, for every stream, how many of its launches are certainly done. An event takes
a copy of it where it is recorded, a wait merges that copy, and what was never recorded orders
nothing, as in CUDA.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from dsa_compile.ir.region import Region
from dsa_compile.ir.streams import has_streams
from tests.verify.launch_log import END, START, Freed, Launch, Log, Recorded, run_region

MAIN = 0


@dataclass(frozen=True)
class Unordered:
    """Two pieces of work that may overlap and must not.

    Attributes:
        first: name of the earlier call.
        second: name of the later one.
        problem: a sentence.
    """

    first: str
    second: str
    problem: str


@dataclass(frozen=True)
class _Placed:
    launch: Launch
    tick: int
    known: dict[int, int]

    def follows(self, other: "_Placed") -> bool:
        return self.known.get(other.launch.stream, 0) >= other.tick


def graph_hazards(region: Region) -> list[Unordered]:
    """Pairs of work that may overlap on streams that are as late as events allow; each once."""
    log = Log()
    if has_streams(region.graph):
        run_region(region, log)
    return list(dict.fromkeys(_unordered(log)))


def _unordered(log: Log) -> Iterator[Unordered]:
    clocks: dict[int, dict[int, int]] = {}
    events: dict[int, dict[int, int]] = {}
    placed: list[_Placed] = []
    freed: dict[int, list[int]] = {}  # by home, memory that its next launch may get
    for entry in log.entries:
        if isinstance(entry, Freed):
            freed.setdefault(log.homes[entry.memory], []).append(entry.memory)
            continue
        clock = clocks.setdefault(entry.stream, {})
        if isinstance(entry, Launch):
            tick = clock.get(entry.stream, 0) + 1
            now = _Placed(entry, tick, dict(clock))
            yield from _against(placed, now, log)
            yield from _reuses(placed, now, freed.pop(entry.stream, []), log)
            clock[entry.stream] = tick
            placed.append(now)
        elif isinstance(entry, Recorded):
            events[entry.event] = dict(clock)
        else:
            for stream, tick in events.get(entry.event, {}).items():
                clock[stream] = max(clock.get(stream, 0), tick)


def _against(placed: list[_Placed], now: _Placed, log: Log) -> Iterator[Unordered]:
    launch = now.launch
    start = next((p for p in reversed(placed) if p.launch.name == START), None)
    if start is not None and launch.name != START and not _ordered(start, now):
        yield Unordered(
            START,
            launch.name,
            f"{launch.name} on stream {launch.stream} does not wait for the region's inputs",
        )
    for before in placed:
        other = before.launch
        if _ordered(before, now):
            continue
        if launch.name == END:
            yield Unordered(
                other.name,
                END,
                f"the region ends without waiting for {other.name} on stream {other.stream}",
            )
            continue
        shared = (other.writes | other.makes) & launch.uses | other.uses & launch.writes
        if shared:
            yield Unordered(
                other.name,
                launch.name,
                f"{other.name} on stream {other.stream} and {launch.name} on stream "
                f"{launch.stream} use {log.names[min(shared)]}, at least one writes it, and "
                "nothing orders them",
            )


def _reuses(
    placed: list[_Placed], now: _Placed, memory: list[int], log: Log
) -> Iterator[Unordered]:
    """Uses of memory that the next launch on its stream may get while they still run."""
    for number in memory:
        for before in placed:
            if number in before.launch.uses and not _ordered(before, now):
                yield Unordered(
                    before.launch.name,
                    now.launch.name,
                    f"{log.names[number]} is used by {before.launch.name} on stream "
                    f"{before.launch.stream} and let go of before {now.launch.name} on stream "
                    f"{now.launch.stream}, which may get its memory without waiting",
                )


def _ordered(before: _Placed, now: _Placed) -> bool:
    return before.launch.stream == now.launch.stream or now.follows(before)
