"""What the runtime's streams do with the stream ops of a graph, beside what those ops say.

A region runs twice as the runtime runs it, its calls doing nothing, on a device that notes on which
stream each call, record and wait comes, and for which record a wait is. The second run finds the
events of the first.
"""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

from torch import fx

from dsa_compile.ir.execution import compile_region
from dsa_compile.ir.region import Region
from dsa_compile.ir.streams import MAIN, has_streams
from dsa_compile.ops import KEEP_ALIVE, ON_STREAM, RECORD_EVENT, STREAM_OPS, WAIT_EVENT
from dsa_compile.runtime.execution import streams

_RUNS = 2


def stream_problem(region: Region) -> str:
    """First difference of what the runtime's streams do from what a region's graph says, as a
    sentence; empty if there is none.

    Args:
        region: of the KERNEL level.
    """
    if not has_streams(region.graph):
        return ""
    done, said = _Device().run(region), list(_said(region.graph))
    for mine, wanted in zip(done, said, strict=False):
        if mine != wanted:
            return f"{region.name}: its streams have {mine} in place of {wanted}"
    return "" if len(done) == len(said) else f"{region.name}: {len(done)} notes for {len(said)}"


def _said(graph: fx.Graph) -> Iterator[str]:
    """The notes that a right device takes; streams are numbered as they are first used."""
    numbers: dict[Any, int] = {MAIN: MAIN}
    events: dict[Any, str] = {}
    for run in range(_RUNS):
        stream = MAIN
        for node in graph.nodes:
            if node.target is ON_STREAM:
                stream = numbers.setdefault(node.args[0], len(numbers))
            elif node.target is WAIT_EVENT:
                yield _note(node, stream, events.get(node.args[0], ""))
            elif node.op == "call_function" and node.target is not KEEP_ALIVE:
                yield _note(node, stream)
                if node.target is RECORD_EVENT:
                    events[node.args[0]] = f"{node.name} of run {run}"
        yield f"the end on stream {stream}"


def _note(node: fx.Node, stream: int, record: str = "") -> str:
    return f"{node.name} on stream {stream}" + (f" for {record}" if record else "")


class _Device:
    """Device that takes notes, in place of ``torch.cuda`` in the runtime."""

    def __init__(self) -> None:
        self._notes: list[str] = []
        self._streams = 0
        self._run = 0
        self._node: Any = None
        self._current = self.Stream()

    def run(self, region: Region) -> list[str]:
        with mock.patch.object(streams, "torch", SimpleNamespace(cuda=self)):
            switch = streams.StreamSwitch(streams.SideStreams())
            forward = compile_region(region, lambda node: self._function(node, switch))
            call = switch.around(forward)
            for self._run in range(_RUNS):
                call(*region.inputs())
                self._notes.append(f"the end on stream {self._current.number}")
        return self._notes

    def _function(self, node: fx.Node, switch: streams.StreamSwitch) -> Callable[..., None]:
        def note(*args: Any, **kwargs: Any) -> None:
            self._node = node
            if node.target in STREAM_OPS:
                switch.function(node.target)(*args)
            else:
                self._notes.append(_note(node, self._current.number))

        return note

    def Stream(self, **kwargs: Any) -> Any:  # noqa: N802
        self._streams += 1
        return SimpleNamespace(number=self._streams - 1)

    def Event(self) -> Any:  # noqa: N802
        last = ""

        def record(stream: Any = None) -> None:
            nonlocal last
            self._notes.append(_note(self._node, (stream or self._current).number))
            last = f"{self._node.name} of run {self._run}"

        def wait(stream: Any = None) -> None:
            self._notes.append(_note(self._node, (stream or self._current).number, last))

        return SimpleNamespace(record=record, wait=wait)

    def current_stream(self) -> Any:
        return self._current

    def set_stream(self, stream: Any) -> None:
        self._current = stream
