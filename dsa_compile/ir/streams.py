"""Streams of a graph: on which each call runs, and which calls are done before it.

Time is a vector clock: for every stream, how many of its calls have certainly finished. A call
knows its own stream's calls before it, and what an event it waited for knew when it was recorded.
The inputs of a region are there from the start: they count as call 1 of stream 0.
"""

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass

from torch import fx

from dsa_compile.ops import ON_STREAM, RECORD_EVENT, STREAM_OPS, WAIT_EVENT

MAIN = 0
"""The stream of the caller, on which a region begins and ends."""

Clock = Mapping[int, int]


@dataclass(frozen=True)
class Moment:
    """A launching call in its place.

    Attributes:
        node: the call; the output node stands for the end of the region.
        index: its position in the graph, by which the host issues it.
        stream: where it runs.
        tick: it is the so-manyth call of its stream.
        known: for each stream, how many of its calls are done before this one starts.
    """

    node: fx.Node
    index: int
    stream: int
    tick: int
    known: Clock

    def follows(self, other: "Moment") -> bool:
        """Whether ``other`` is certainly done when this starts."""
        return self.known.get(other.stream, 0) >= other.tick


@dataclass(frozen=True)
class Recorded:
    """An event: where it was recorded, and what is done when it is reached."""

    node: fx.Node
    stream: int
    after: fx.Node | None  # the last call of that stream before it; None: the region's start
    known: Clock


class Timeline:
    """One walk over a graph.

    Args:
        graph: of a region.
        launching: the calls that use the device; views and the like are nowhere.

    Attributes:
        moments: the launching calls in order, the region's end last.
        waits: for each ``wait_event`` the event it waits for, or None if none was recorded.
        streams: every node's stream, stream ops included: the one current after it.
    """

    def __init__(self, graph: fx.Graph, launching: Container[fx.Node]) -> None:
        self.moments: list[Moment] = []
        self.waits: dict[fx.Node, Recorded | None] = {}
        self.streams: dict[fx.Node, int] = {}
        self._events: dict[int, Recorded] = {}
        self._clocks: dict[int, dict[int, int]] = {MAIN: {MAIN: 1}}
        self._last: dict[int, fx.Node] = {}
        stream = MAIN
        for index, node in enumerate(graph.nodes):
            if node.target is ON_STREAM:
                stream = node.args[0]
            elif node.target in (RECORD_EVENT, WAIT_EVENT):
                self._event(node, stream)
            elif node.op == "output" or node in launching:
                self._call(node, index, MAIN if node.op == "output" else stream)
            self.streams[node] = stream

    def of_stream(self, stream: int) -> Iterator[Moment]:
        """The calls of one stream; the region's end belongs to stream 0."""
        return (moment for moment in self.moments if moment.stream == stream)

    def _call(self, node: fx.Node, index: int, stream: int) -> None:
        clock = self._clocks.setdefault(stream, {})
        tick = clock.get(stream, 0) + 1
        self.moments.append(Moment(node, index, stream, tick, dict(clock)))
        clock[stream] = tick
        self._last[stream] = node

    def _event(self, node: fx.Node, stream: int) -> None:
        clock = self._clocks.setdefault(stream, {})
        event = node.args[0]
        assert isinstance(event, int)
        if node.target is RECORD_EVENT:
            self._events[event] = Recorded(node, stream, self._last.get(stream), dict(clock))
            return
        found = self.waits[node] = self._events.get(event)
        for other, tick in found.known.items() if found else ():
            clock[other] = max(clock.get(other, 0), tick)


def has_streams(graph: fx.Graph) -> bool:
    """Whether a graph says anything about streams."""
    return any(node.target in STREAM_OPS for node in graph.nodes)
