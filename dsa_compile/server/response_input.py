"""The input of ``/v1/responses`` in the form of chats: messages, tools, the answer's format."""

from collections.abc import Callable, Mapping
from typing import Any

from dsa_compile.server.conversation import NO_TEXT, Conversation
from dsa_compile.server.errors import bad_request, unsupported

_TEXT_PARTS = ("input_text", "output_text", "text")
_ELSEWHERE = ("_call", "_call_output", "_tools", "_snapshot", "compaction")
"""How items of tools that another server or the client alone knows end, which are left out."""
_FIELDS = {  # by the names in chats, where they have others
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
    "response_format.json_schema": "text.format",
}


class _Items(Conversation):
    """The conversation of items of ``/v1/responses``."""

    def add(self, item: Mapping[str, Any], param: str) -> None:
        """Add an item of the input.

        Reasoning and calls are items of their own in responses; here they are an assistant
        message's, with the text beside them.

        Raises:
            ApiError: it is of an unknown kind (400).
        """
        match item.get("type", "message"):
            case "message" if item.get("role") == "assistant":
                content = _text(item.get("content"), f"{param}.content", _TEXT_PARTS)
                self._answer(param, new="content" in self._last())["content"] = content
                self.name("content", f"{param}.content")
            case "message":
                content = _text(item.get("content"), f"{param}.content", _TEXT_PARTS)
                self.begin({"role": item.get("role"), "content": content}, param)
            case "reasoning":
                texts = item.get("content") or item.get("summary") or []
                text = _text(texts, param, ("reasoning_text", "summary_text"))
                self._answer(param, new=True)["reasoning_content"] = text
                self.name("reasoning_content", f"{param}.content")
            case "function_call" | "custom_tool_call":
                self._answer(param)
                own = {"": param, ".function": param, ".id": f"{param}.call_id"}
                free = {"input": item.get("input")}  # a text in no form
                arguments = free if "input" in item else item.get("arguments")
                self.call(item.get("call_id"), item.get("name"), arguments, own)
            case "function_call_output" | "custom_tool_call_output":
                content = _text(item.get("output"), f"{param}.output", _TEXT_PARTS, self.leave_out)
                call_id = item.get("call_id")
                self.begin({"role": "tool", "tool_call_id": call_id, "content": content}, param)
                self.name("tool_call_id", f"{param}.call_id")
                self.name("content", f"{param}.output")
            case str(kind) if kind.endswith(_ELSEWHERE):
                self.leave_out(param, kind)
            case kind:
                problem = "known: message, reasoning, function_call, function_call_output"
                raise unsupported(f"{param}.type", f"{kind!r:.80}; {problem}")

    def _last(self) -> dict[str, Any]:
        """The last message if it is an assistant's whose answer has begun; else an empty one."""
        last = self.messages[-1] if self.messages else {}
        return last if last.get("role") == "assistant" else {}

    def _answer(self, param: str, new: bool = False) -> dict[str, Any]:
        """The assistant message that the next item belongs to."""
        if new or not self._last():
            self.begin({"role": "assistant"}, param)
        return self.messages[-1]


def conversation_of(given: str | list[Any], instructions: str | None) -> Conversation:
    """The conversation of a request.

    Args:
        given: ``input``: a text, or items.
        instructions: a system message before them.

    Raises:
        ApiError: an item is of another kind (400).
    """
    made = _Items(_FIELDS)
    if instructions:
        made.add({"role": "system", "content": instructions}, "instructions")
    if isinstance(given, str):
        made.add({"role": "user", "content": given}, "input")
        return made
    for number, item in enumerate(given):
        made.add(item, f"input[{number}]")
    return made


def _text(
    content: Any,
    param: str,
    kinds: tuple[str, ...],
    leave_out: Callable[[str, object], None] | None = None,
) -> Any:
    """Text of parts; what is no list is left as it is, for the chat format to judge."""
    if not isinstance(content, list):
        return content
    texts = []
    for number, part in enumerate(content):
        if not isinstance(part, Mapping) or part.get("type") not in kinds:
            kind = part.get("type") if isinstance(part, Mapping) else part
            if leave_out is not None and isinstance(kind, str):
                leave_out(f"{param}[{number}]", kind)
                texts.append(NO_TEXT % kind[:40])
                continue
            problem = f"{kind!r:.80}; the model reads text alone"
            raise unsupported(f"{param}[{number}].type", problem)
        text = part.get("text")
        if not isinstance(text, str):
            raise bad_request(f"{param}[{number}].text must be a string", param)
        texts.append(text)
    return "".join(texts)


def tools_of(tools: list[dict[str, Any]] | None, made: Conversation) -> list[dict[str, Any]] | None:
    """The functions of a request in the form of chats; tools of other types are left out."""
    found: list[dict[str, Any]] = []
    for number, tool in enumerate(tools or ()):
        if tool.get("type") != "function":
            made.leave_out(f"tools[{number}]", tool.get("type"))
            continue
        made.fields[f"tools[{len(found)}]"] = f"tools[{number}]"
        function = {name: value for name, value in tool.items() if name != "type"}
        found.append({"type": "function", "function": function})
    return found or None


def response_format_of(text: dict[str, Any] | None, made: Conversation) -> dict[str, Any] | None:
    """``text.format`` in the form of the ``response_format`` of chats.

    Raises:
        ApiError: ``text`` has other fields, or the format is none (400).
    """
    if not text:
        return None
    for name, value in text.items():
        if name == "verbosity" and value not in (None, "medium"):
            made.leave_out("text.verbosity", value)
        elif name not in ("format", "verbosity"):
            raise unsupported(f"text.{name}", "use text.format")
    described = text.get("format")
    if described is None:
        return None
    if not isinstance(described, dict):
        raise bad_request("text.format must be an object", "text.format")
    if described.get("type") != "json_schema":
        return described
    return {"type": "json_schema", "json_schema": described}
