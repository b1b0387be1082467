"""A graph in the order of its calls, each on the stream that it runs on."""

from collections.abc import Sequence
from dataclasses import dataclass

from dsa_compile.ir.graph import Graph
from dsa_compile.ir.listing import Listing, Statement

_ON_STREAM = "dsa.on_stream.default"
_RECORD = "dsa.record_event.default"
_WAIT = "dsa.wait_event.default"
_KEEP = "dsa.keep_alive.default"


@dataclass(frozen=True)
class Row:
    """One row: a call or a wait.

    Attributes:
        stream: where.
        statement: the call; for a wait, the call of which the result is waited for, or None for
            the inputs.
        waits_for: for a wait, the stream that is waited for; else None.
        holds: whether it only keeps tensors alive.
    """

    stream: int
    statement: Statement | None
    waits_for: int | None = None
    holds: bool = False


def rows(graph: Graph) -> list[Row]:
    """Rows of a graph's calls and waits, in order, without stream switches and event records."""
    listing = Listing(graph)
    found: list[Row] = []
    stream = 0
    events: dict[object, tuple[int, Statement | None]] = {}
    latest: dict[int, Statement] = {}
    for line in listing.statements():
        node = graph.nodes[line.nodes[0]]
        if node.target == _ON_STREAM:
            stream = node.args[0]
        elif node.target == _RECORD:
            events[node.args[0]] = stream, latest.get(stream)
        elif node.target == _WAIT:
            source, after = events.get(node.args[0], (stream, None))
            found.append(Row(stream, after, source))
        else:
            holds = node.target == _KEEP
            found.append(Row(stream, line, holds=holds))
            if not holds:
                latest[stream] = line
    return found


def lane_texts(listed: Sequence[Row]) -> list[str]:
    """Streams of each row, drawn: ``● │``; a wait is an arrow to the stream that waits.

    A graph on one stream has none to draw.
    """
    streams = sorted({row.stream for row in listed})
    if len(streams) < 2:
        return [""] * len(listed)
    place = {stream: index for index, stream in enumerate(streams)}
    used = {
        stream: [index for index, row in enumerate(listed) if stream in (row.stream, row.waits_for)]
        for stream in streams
    }
    return [
        _lanes(row, [used[s][0] <= index <= used[s][-1] for s in streams], place)
        for index, row in enumerate(listed)
    ]


def _lanes(row: Row, live: Sequence[bool], place: dict[int, int]) -> str:
    cells = ["│ " if alive else "  " for alive in live]
    here = place[row.stream]
    if row.waits_for is None:
        cells[here] = "· " if row.holds else "● "
        return "".join(cells)
    there = place[row.waits_for]
    first, last = min(here, there), max(here, there)
    for index in range(first, last):
        cells[index] = "──"
    cells[last] = cells[last][0] + " "
    text = list("".join(cells))
    text[2 * there] = "├" if there < here else "┤" if there > here else "│"
    text[2 * here] = "▼" if here != there else "│"
    return "".join(text)
