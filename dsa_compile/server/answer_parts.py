"""Parts of an answer that grow in a stream: each run of reasoning, each run of text, each call."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

from dsa_compile.chat import (
    ContentDelta,
    Event,
    Finished,
    ReasoningDelta,
    ToolCallBegin,
    ToolCallDelta,
    ToolCallEnd,
)

Json = dict[str, Any]
Begun = ReasoningDelta | ContentDelta | ToolCallBegin


class _Part(Protocol):  # its methods give events for a stream
    content: Json

    def begin(self) -> Iterator[Json]: ...
    def delta(self, text: str) -> Json: ...
    def end(self, complete: bool) -> Iterator[Json]: ...


class AnswerParts:
    """Parts made of what a parser reports, in the order in which they come.

    Args:
        make: gives a part by its place and the event that begins it.

    Attributes:
        parts: so far; the last one may still grow.
    """

    def __init__(self, make: Callable[[int, Begun], _Part]) -> None:
        self.parts: list[_Part] = []
        self._make = make
        self._open: type[Begun] | None = None  # what began the part that grows

    def add(self, events: Iterable[Event], cut: bool = False) -> Iterator[Json]:
        """Events for a stream; ``cut`` if the parser's text ends before the model ended it."""
        for found in events:
            match found:
                case ReasoningDelta(text) | ContentDelta(text):
                    if self._open is not type(found):
                        yield from self._begin(found)
                    yield self.parts[-1].delta(text)
                case ToolCallBegin():
                    yield from self._begin(found)
                case ToolCallDelta(_, text):
                    yield self.parts[-1].delta(text)
                case ToolCallEnd(_, complete):
                    yield from self._end(complete)
                case Finished():
                    yield from self._end(not cut)

    def _begin(self, found: Begun) -> Iterator[Json]:
        yield from self._end(True)
        self._open = type(found)
        self.parts.append(self._make(len(self.parts), found))
        yield from self.parts[-1].begin()

    def _end(self, complete: bool) -> Iterator[Json]:
        if self._open is not None:
            yield from self.parts[-1].end(complete)
            self._open = None
