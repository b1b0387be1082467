"""The input of ``/v1/responses`` in the form of chats: messages, tools, the answer's format."""

import re
from collections.abc import Mapping
from typing import Any

from dsa_compile.server.errors import ApiError, bad_request, unsupported

_TEXT_PARTS = ("input_text", "output_text", "text")


class Conversation:
    """The messages of a request, and the field that each comes from.

    Attributes:
        messages: in the form of chats.
        fields: as many names, such as ``input[3]``.
    """

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.fields: list[str] = []

    def own_name(self, error: ApiError) -> ApiError:
        """An error about a field of chats, by the field's name in responses."""
        for pattern, own in (
            (r"messages\[(\d+)\]", lambda found: self.fields[int(found[1])]),
            (r"^messages\b", lambda _: "input"),
            (r"^(tools\[\d+\])\.function\b", lambda found: found[1]),
            (r"^reasoning_effort\b", lambda _: "reasoning.effort"),
            (r"^response_format(\.json_schema)?", lambda _: "text.format"),
        ):
            error.param = error.param and re.sub(pattern, own, error.param)
            error.message = re.sub(pattern, own, error.message)
        return error


def conversation_of(given: str | list[Any], instructions: str | None) -> Conversation:
    """The conversation of a request.

    Reasoning and calls are items of their own in responses; here they are an assistant message's,
    with the text beside them.

    Args:
        given: ``input``: a text, or items.
        instructions: a system message before them.

    Raises:
        ApiError: an item is of another kind (400).
    """
    made = Conversation()
    messages, fields = made.messages, made.fields
    if instructions:
        messages.append({"role": "system", "content": instructions})
        fields.append("instructions")
    if isinstance(given, str):
        messages.append({"role": "user", "content": given})
        fields.append("input")
        return made
    for number, item in enumerate(given):
        param = f"input[{number}]"
        match item.get("type", "message"):
            case "message":
                _add_message(messages, item, param)
            case "reasoning":
                texts = item.get("content") or item.get("summary") or []
                text = _text(texts, param, ("reasoning_text", "summary_text"))
                _assistant(messages, new=True)["reasoning_content"] = text
            case "function_call":
                function = {"name": item.get("name"), "arguments": item.get("arguments")}
                call = {"id": item.get("call_id"), "type": "function", "function": function}
                _assistant(messages).setdefault("tool_calls", []).append(call)
            case "function_call_output":
                content = _text(item.get("output"), f"{param}.output", _TEXT_PARTS)
                call_id = item.get("call_id")
                messages.append({"role": "tool", "tool_call_id": call_id, "content": content})
            case kind:
                problem = "known: message, reasoning, function_call, function_call_output"
                raise unsupported(f"{param}.type", f"{kind!r:.80}; {problem}")
        fields += [param] * (len(messages) - len(fields))
    return made


def _add_message(messages: list[dict[str, Any]], item: Mapping[str, Any], param: str) -> None:
    content = _text(item.get("content"), f"{param}.content", _TEXT_PARTS)
    if item.get("role") == "assistant":
        _assistant(messages, new="content" in _last(messages))["content"] = content
    else:
        messages.append({"role": item.get("role"), "content": content})


def _last(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The last message if it is an assistant's whose answer has begun; else an empty one."""
    return messages[-1] if messages and messages[-1]["role"] == "assistant" else {}


def _assistant(messages: list[dict[str, Any]], new: bool = False) -> dict[str, Any]:
    """The assistant message that the next item belongs to."""
    if new or not _last(messages):
        messages.append({"role": "assistant"})
    return messages[-1]


def _text(content: Any, param: str, kinds: tuple[str, ...]) -> Any:
    """Text of parts; what is no list is left as it is, for the chat format to judge."""
    if not isinstance(content, list):
        return content
    texts = []
    for number, part in enumerate(content):
        if not isinstance(part, Mapping) or part.get("type") not in kinds:
            kind = part.get("type") if isinstance(part, Mapping) else part
            problem = f"{kind!r:.80}; the model reads text alone"
            raise unsupported(f"{param}[{number}].type", problem)
        text = part.get("text")
        if not isinstance(text, str):
            raise bad_request(f"{param}[{number}].text must be a string", param)
        texts.append(text)
    return "".join(texts)


def tools_of(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """The functions of a request in the form of chats.

    Raises:
        ApiError: a tool is no function (400).
    """
    found = []
    for number, tool in enumerate(tools or ()):
        if tool.get("type") != "function":
            problem = f"{tool.get('type')!r:.80}; the tools are functions"
            raise unsupported(f"tools[{number}].type", problem)
        function = {name: value for name, value in tool.items() if name != "type"}
        found.append({"type": "function", "function": function})
    return found or None


def response_format_of(text: dict[str, Any] | None) -> dict[str, Any] | None:
    """``text.format`` in the form of the ``response_format`` of chats.

    Raises:
        ApiError: ``text`` has other fields, or the format is none (400).
    """
    if not text:
        return None
    for name, value in text.items():
        if name != "format" and not (name == "verbosity" and value in (None, "medium")):
            raise unsupported(f"text.{name}", "use text.format")
    described = text.get("format")
    if described is None:
        return None
    if not isinstance(described, dict):
        raise bad_request("text.format must be an object", "text.format")
    if described.get("type") != "json_schema":
        return described
    return {"type": "json_schema", "json_schema": described}
