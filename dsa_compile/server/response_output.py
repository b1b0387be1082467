"""Items of the output of ``/v1/responses``, and the events of a stream that tell how they grow."""

import secrets
from collections.abc import Iterator
from typing import ClassVar

from dsa_compile.chat import ReasoningDelta, ToolCallBegin
from dsa_compile.server.answer_parts import Begun, Json


class _Item:
    """An item that grows; events come without their numbers."""

    events = ""  # their common part

    def __init__(self, index: int, content: Json) -> None:
        self.content = content
        self._parts: list[str] = []
        self._place = {"item_id": content["id"], "output_index": index}

    def delta(self, text: str) -> Json:
        self._parts.append(text)
        return {"type": f"response.{self.events}.delta", **self._place, "delta": text}

    def begin(self) -> Iterator[Json]:
        yield self._whole("added")

    def end(self, complete: bool) -> Iterator[Json]:
        self.content["status"] = "completed" if complete else "incomplete"
        yield self._whole("done")

    def _whole(self, what: str) -> Json:
        place = self._place["output_index"]
        item = {"item": dict(self.content), "output_index": place}
        return {"type": f"response.output_item.{what}", **item}


class _Parted(_Item):
    """An item whose text is a part of its content."""

    part: ClassVar[Json]

    def __init__(self, index: int, content: Json) -> None:
        super().__init__(index, {**content, "status": "in_progress", "content": []})
        self._place |= {"content_index": 0}

    def begin(self) -> Iterator[Json]:
        yield from super().begin()
        yield {"type": "response.content_part.added", **self._place, "part": self._part()}

    def end(self, complete: bool) -> Iterator[Json]:
        part = self._part()
        self.content["content"] = [part]
        extra = {name: value for name, value in part.items() if name in ("text", "logprobs")}
        yield {"type": f"response.{self.events}.done", **self._place, **extra}
        yield {"type": "response.content_part.done", **self._place, "part": part}
        yield from super().end(complete)

    def _part(self) -> Json:
        return {**self.part, "text": "".join(self._parts)}


class _Reasoning(_Parted):
    events = "reasoning_text"
    part: ClassVar[Json] = {"type": "reasoning_text"}

    def __init__(self, index: int) -> None:
        super().__init__(index, {"type": "reasoning", "id": new_id("rs"), "summary": []})


class _Text(_Parted):
    events = "output_text"
    part: ClassVar[Json] = {"type": "output_text", "annotations": [], "logprobs": []}

    def __init__(self, index: int) -> None:
        super().__init__(index, {"type": "message", "id": new_id("msg"), "role": "assistant"})

    def delta(self, text: str) -> Json:
        return {**super().delta(text), "logprobs": []}


class _Call(_Item):
    events = "function_call_arguments"

    def __init__(self, index: int, call_id: str, name: str) -> None:
        content = {"type": "function_call", "id": new_id("fc"), "call_id": call_id, "name": name}
        super().__init__(index, {**content, "arguments": "", "status": "in_progress"})

    def end(self, complete: bool) -> Iterator[Json]:
        text = self.content["arguments"] = "".join(self._parts)
        done = {"name": self.content["name"], "arguments": text}
        yield {"type": f"response.{self.events}.done", **self._place, **done}
        yield from super().end(complete)


def make_item(index: int, begun: Begun) -> _Item:
    """The item that an event of a parser begins."""
    if isinstance(begun, ToolCallBegin):
        return _Call(index, begun.id, begun.name)
    return _Reasoning(index) if isinstance(begun, ReasoningDelta) else _Text(index)


def new_id(prefix: str) -> str:
    """An id as those of OpenAI's responses look."""
    return f"{prefix}_{secrets.token_hex(16)}"
