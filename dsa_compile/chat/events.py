"""Events of a streaming parser of a model's answer, and the answer put together from them."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ReasoningDelta:
    """Further text of the reasoning."""

    text: str


@dataclass(frozen=True)
class ContentDelta:
    """Further text of the answer."""

    text: str


@dataclass(frozen=True)
class ToolCallBegin:
    """A call begins.

    Attributes:
        index: of the call in the answer, from 0.
        id: made here; results refer to it.
        name: of the function.
    """

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class ToolCallDelta:
    """Further text of a call's arguments; the texts of all, put together, are a JSON object."""

    index: int
    text: str


@dataclass(frozen=True)
class ToolCallEnd:
    """A call ends.

    Attributes:
        index: of the call in the answer.
        complete: whether it was well-formed to its end. If not, its arguments are not valid JSON:
            a call of which half is missing must not be carried out.
    """

    index: int
    complete: bool


@dataclass(frozen=True)
class Finished:
    """End of an answer: nothing follows.

    Attributes:
        called: whether a complete call was made, so that OpenAI's finish reason is ``tool_calls``.
    """

    called: bool


Event = ReasoningDelta | ContentDelta | ToolCallBegin | ToolCallDelta | ToolCallEnd | Finished


@dataclass(frozen=True)
class ParsedCall:
    """A call of an answer.

    Attributes:
        id: see :class:`ToolCallBegin`.
        name: of the function.
        arguments: JSON text; cut short if not complete.
        complete: see :class:`ToolCallEnd`.
    """

    id: str
    name: str
    arguments: str
    complete: bool


@dataclass(frozen=True)
class Answer:
    """A whole answer.

    Attributes:
        reasoning: text before the answer itself.
        content: the answer's text.
        tool_calls: its calls, in order.
    """

    reasoning: str
    content: str
    tool_calls: tuple[ParsedCall, ...]

    def message(self) -> dict[str, Any]:
        """The answer as an assistant message of OpenAI's API, with ``reasoning_content``."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content or None}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in self.tool_calls
            ]
        return message


def merged(events: Iterable[Event]) -> list[Event]:
    """Events with neighbouring pieces of the same text joined, and without empty ones."""
    result: list[Event] = []
    for event in events:
        if isinstance(event, ReasoningDelta | ContentDelta | ToolCallDelta):
            if not event.text:
                continue
            last = result[-1] if result else None
            if isinstance(event, ToolCallDelta):
                if isinstance(last, ToolCallDelta) and last.index == event.index:
                    result[-1] = ToolCallDelta(event.index, last.text + event.text)
                    continue
            elif type(last) is type(event):
                result[-1] = type(event)(last.text + event.text)
                continue
        result.append(event)
    return result


def collect(events: Iterable[Event]) -> Answer:
    """The answer that a parser's events describe."""
    reasoning: list[str] = []
    content: list[str] = []
    begun: dict[int, ToolCallBegin] = {}
    arguments: dict[int, list[str]] = {}
    complete: set[int] = set()
    for event in events:
        match event:
            case ReasoningDelta(text):
                reasoning.append(text)
            case ContentDelta(text):
                content.append(text)
            case ToolCallBegin(index):
                begun[index] = event
                arguments[index] = []
            case ToolCallDelta(index, text):
                arguments[index].append(text)
            case ToolCallEnd(index, True):
                complete.add(index)
    calls = [
        ParsedCall(call.id, call.name, "".join(arguments[index]), index in complete)
        for index, call in sorted(begun.items())
    ]
    return Answer("".join(reasoning), "".join(content), tuple(calls))
