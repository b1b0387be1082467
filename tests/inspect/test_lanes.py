"""Streams drawn beside a graph."""

from pathlib import Path

from dsa_compile.inspect.lanes import lane_texts, rows
from dsa_compile.inspect.store import Store
from tests.inspect.drawn import drawn

TWO_STREAMS = """
    x
    a = dsa.first.default(x)
    r = dsa.record_event.default(0)
    b = dsa.second.default(a)
    s = dsa.on_stream.default(1)
    w = dsa.wait_event.default(0)
    c = dsa.third.default(a)
    e = dsa.record_event.default(1)
    t = dsa.on_stream.default(0)
    v = dsa.wait_event.default(1)
    k = dsa.keep_alive.default(a)
    d = dsa.fourth.default(b, c)
    return d
"""


def test_calls_waits_and_lifetimes() -> None:
    listed = rows(drawn("g", TWO_STREAMS))
    told = [
        (row.stream, row.waits_for, None if row.statement is None else row.statement.nodes[0])
        for row in listed
    ]
    assert told == [
        (0, None, "a"), (0, None, "b"), (1, 0, "a"), (1, None, "c"), (0, 1, "c"), (0, None, "k"),
        (0, None, "d"),
    ]  # fmt: skip
    assert [row.holds for row in listed] == [False] * 5 + [True, False]
    assert lane_texts(listed) == ["●   ", "●   ", "├─▼ ", "│ ● ", "▼─┤ ", "·   ", "●   "]


def test_an_event_before_any_call_stands_for_the_inputs() -> None:
    early = TWO_STREAMS.replace("    a = dsa.first.default(x)\n", "").replace(
        "    r = dsa.record_event.default(0)\n",
        "    r = dsa.record_event.default(0)\n    a = dsa.first.default(x)\n",
    )
    (wait,) = (row for row in rows(drawn("g", early)) if row.waits_for == 0)
    assert wait.statement is None


def test_one_stream_has_no_lanes() -> None:
    listed = rows(drawn("g", "x\n a = dsa.first.default(x)\n return a"))
    assert lane_texts(listed) == [""]


def test_every_call_of_a_real_graph_is_drawn(published: Path) -> None:
    graph = Store.open(published).final["moe.long"]
    listed = rows(graph)
    shown = [row.statement.nodes[0] for row in listed if row.waits_for is None and row.statement]
    steering = ("dsa.on_stream.", "dsa.record_event.", "dsa.wait_event.", "operator.")
    assert shown == [n.name for n in graph.calls if not n.target.startswith(steering)]
    waits = [row for row in listed if row.waits_for is not None]
    assert len(waits) == sum(n.target == "dsa.wait_event.default" for n in graph.calls)
    assert all(row.waits_for != row.stream for row in waits)
