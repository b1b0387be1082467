"""Messages of a chat request, in the form of OpenAI's API, checked before they are encoded."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dsa_compile.chat.json_text import checked_text, parse_cut_json, parse_json, to_json
from dsa_compile.chat.tools import Tool, is_tool_name, parse_tools
from dsa_compile.errors import ChatError

ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True)
class ToolCall:
    """A call that an assistant message made.

    Attributes:
        name: of the function.
        arguments: parsed; ``""``, null and an empty list are no arguments. Of text that is cut off,
            what is there; text that is no object either is the argument ``arguments``.
        id: that results refer to; None if the call has none.
    """

    name: str
    arguments: Mapping[str, Any]
    id: str | None


@dataclass(frozen=True)
class Message:
    """A message whose fields have the types that encodings rely on.

    Attributes:
        param: its place in the request, for errors: ``messages[3]``.
        role: one of :data:`ROLES`.
        content: text; parts are joined without anything between them, null is empty.
        reasoning: what an assistant thought, from ``reasoning_content`` or ``reasoning``.
        tool_calls: of an assistant.
        tool_call_id: of a tool's result; None if it has none.
        slot: of a tool's result: the number of the call that it answers.
        tools: that a system or developer message brings.
        response_format: that a system or developer message brings.
        source: the message as the request has it.
    """

    param: str
    role: str
    content: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    slot: int = 0
    tools: tuple[Tool, ...] = ()
    response_format: Any = None
    source: Mapping[str, Any] | None = None


def parse_messages(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """The messages of a request, checked one by one.

    Raises:
        ChatError: there are none, or one is malformed; names the message and the field.
    """
    if not isinstance(messages, list | tuple):
        raise ChatError("messages", "should be a list of messages")
    if not messages:
        raise ChatError("messages", "the list is empty; send at least one message")
    return [_parse_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _parse_message(message: Any, param: str) -> Message:
    if not isinstance(message, Mapping):
        raise ChatError(param, "should be an object with a role and content")
    role = message.get("role")
    if role not in ROLES:
        raise ChatError(f"{param}.role", f"should be one of {', '.join(ROLES)}; found {role!r:.80}")
    content = _content(message.get("content"), f"{param}.content")
    if role in ("user", "developer") and message.get("content") is None:
        raise ChatError(f"{param}.content", f"a {role} message needs text")
    if role == "assistant":
        return Message(
            param, role, content, _reasoning(message, param), _tool_calls(message, param),
            source=message,
        )  # fmt: skip
    if role == "tool":
        identity = _identity(message.get("tool_call_id"), f"{param}.tool_call_id")
        return Message(param, role, content, tool_call_id=identity, source=message)
    if role == "user":
        return Message(param, role, content, source=message)
    return Message(
        param, role, content, source=message,
        tools=tuple(parse_tools(message.get("tools"), f"{param}.tools")),
        response_format=message.get("response_format"),
    )  # fmt: skip


def _content(content: Any, param: str) -> str:
    if content is None:
        return ""
    if not isinstance(content, list | tuple):
        return checked_text(content, param)
    return "".join(_part(part, f"{param}[{i}]") for i, part in enumerate(content))


def _part(part: Any, param: str) -> str:
    if isinstance(part, str):
        return checked_text(part, param)
    if not isinstance(part, Mapping) or part.get("type") != "text":
        kind = part.get("type") if isinstance(part, Mapping) else part
        raise ChatError(f"{param}.type", f"the model reads text alone, found {kind!r:.80}")
    return checked_text(part.get("text"), f"{param}.text")


def _reasoning(message: Mapping[str, Any], param: str) -> str:
    for field in ("reasoning_content", "reasoning"):
        if message.get(field) is not None:
            return checked_text(message[field], f"{param}.{field}")
    return ""


def _tool_calls(message: Mapping[str, Any], param: str) -> tuple[ToolCall, ...]:
    calls = message.get("tool_calls")
    if calls is None:
        return ()
    if not isinstance(calls, list | tuple):
        raise ChatError(f"{param}.tool_calls", "should be a list of calls")
    parsed = tuple(_tool_call(call, f"{param}.tool_calls[{i}]") for i, call in enumerate(calls))
    seen: set[str] = set()
    for i, call in enumerate(parsed):
        if call.id is not None and call.id in seen:
            raise ChatError(f"{param}.tool_calls[{i}].id", f"{call.id!r:.80} is another call's too")
        seen.update({call.id} if call.id is not None else ())
    return parsed


def _tool_call(call: Any, param: str) -> ToolCall:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise ChatError(f"{param}.function", "should be an object with a name and arguments")
    name = function.get("name")
    if not is_tool_name(name):
        raise ChatError(f"{param}.function.name", f"no function can have the name {name!r:.80}")
    arguments = _arguments(function.get("arguments"), f"{param}.function.arguments")
    return ToolCall(str(name), arguments, _identity(call.get("id"), f"{param}.id"))


def _arguments(arguments: Any, param: str) -> Mapping[str, Any]:
    if isinstance(arguments, str):
        return _written_arguments(checked_text(arguments, param), param)
    if arguments is None or arguments == []:  # some languages write an empty object so
        return {}
    if not isinstance(arguments, Mapping):
        raise ChatError(param, "should be a JSON object, one field a parameter")
    to_json(arguments, param)
    return arguments


def _written_arguments(text: str, param: str) -> Mapping[str, Any]:
    """What a model wrote: it stays in the conversation, so what is wrong with it is no error."""
    if not text.strip():
        return {}
    for parse in (parse_json, parse_cut_json):
        try:
            value = parse(text)
            to_json(value, param)
        except (ValueError, ChatError):
            continue
        if value is None or value == []:
            return {}
        if isinstance(value, Mapping):
            return value
    return {"arguments": text}  # as DeepSeek-V4's encoder does


def _identity(value: Any, param: str) -> str | None:
    return None if value is None or value == "" else checked_text(value, param)
