"""The input of ``/v1/messages`` in the form of chats: messages and tools."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dsa_compile.server.conversation import NO_TEXT, Conversation
from dsa_compile.server.errors import bad_request, unsupported
from dsa_compile.server.openai_types import MessagesRequest

_FIELDS = {  # by the names in chats, where they have others
    "stop": "stop_sequences",
    "reasoning_effort": "output_config.effort",
    "response_format": "output_config.format",
    "response_format.json_schema.schema": "output_config.format.schema",
}
# Claude Code's first line of a system prompt: it differs in every request, and no prefix would be
# found in the cache behind it.
_BILLING = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n?")


def conversation_of(body: MessagesRequest) -> Conversation:
    """The conversation of a request.

    Raises:
        ApiError: a block is malformed, or of a kind that no text stands for (400).
    """
    made = Conversation(_FIELDS)
    for name in body.model_extra or ():
        made.leave_out(ascii(name)[1:-1][:80])
    if system := _text(made, body.system, "system"):
        made.begin({"role": "system", "content": system}, "system")
    for number, message in _results_first(body.messages):
        _add(made, message, f"messages[{number}]")
    return made


def tools_of(made: Conversation, tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]]:
    """The tools that a client runs, in the form of chats; those of a server are left out."""
    found: list[dict[str, Any]] = []
    for number, tool in enumerate(tools or ()):
        if (kind := tool.get("type") or "custom") != "custom":
            made.leave_out(f"tools[{number}]", kind)
            continue
        made.fields[f"tools[{len(found)}].parameters"] = f"tools[{number}].input_schema"
        made.fields[f"tools[{len(found)}]"] = f"tools[{number}]"
        names = {"name": "name", "description": "description", "input_schema": "parameters"}
        function = {names[key]: tool[key] for key in names if tool.get(key) is not None}
        found.append({"type": "function", "function": function})
    return found


def tool_choice_of(choice: Mapping[str, Any] | None) -> Any:
    """``tool_choice`` in the form of chats."""
    match choice:
        case {"type": "tool", "name": name}:
            return {"type": "function", "name": name}
        case {"type": "auto" | "any" | "none" as kind}:
            return "required" if kind == "any" else kind
        case None:
            return None
    raise bad_request("tool_choice must be of type auto, any, tool (by its name) or none")


def _results_first(
    messages: Sequence[Mapping[str, Any]],
) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Numbered messages; those of the system between calls and their results come after these,
    since chats have results next to their calls."""
    waiting: list[tuple[int, Mapping[str, Any]]] = []
    called = False
    for number, message in enumerate(messages):
        if called and message.get("role") == "system":
            waiting.append((number, message))
            continue
        answers = called and _has(message, "tool_result")
        if not answers:
            yield from waiting
            waiting.clear()
        yield number, message
        called = answers or _has(message, "tool_use")
    yield from waiting


def _has(message: Mapping[str, Any], kind: str) -> bool:
    """Whether a message has a block of a kind."""
    content = message.get("content")
    blocks = content if isinstance(content, list) else ()
    return any(isinstance(block, Mapping) and block.get("type") == kind for block in blocks)


def _add(made: Conversation, message: Mapping[str, Any], param: str) -> None:
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise bad_request(f"{param}.role must be user, assistant or system", f"{param}.role")
    if not isinstance(content, list):
        made.begin({"role": role, "content": content}, param)
        return
    blocks = [(block, f"{param}.content[{n}]") for n, block in enumerate(content)]
    if role == "assistant":
        made.begin({"role": role}, param)
    texts: list[str] = []
    thoughts: list[str] = []
    for block, own in blocks:
        match block:
            case {"type": "thinking", "thinking": str(text)} if role == "assistant":
                thoughts.append(text)
            case {"type": "tool_use"} if role == "assistant":
                places = {"": own, ".function.arguments": f"{own}.input", ".function": own}
                made.call(block.get("id"), block.get("name"), block.get("input"), places)
            case {"type": "tool_result"} if role == "user":  # before the text beside it
                text = _text(made, block.get("content"), f"{own}.content", lenient=True)
                call_id = block.get("tool_use_id")
                made.begin({"role": "tool", "tool_call_id": call_id, "content": text}, own)
                made.name("tool_call_id", f"{own}.tool_use_id")
            case _:
                texts.append(_block(made, block, own, lenient=role == "assistant"))
    text = "\n".join(filter(None, texts))
    if role == "assistant":
        made.messages[-1] |= {"content": text, "reasoning_content": "\n".join(thoughts)}
    elif texts or not blocks:
        made.begin({"role": role, "content": text}, param)


def _text(made: Conversation, content: Any, param: str, lenient: bool = False) -> str:
    """The text of a field that has a text or blocks."""
    if content is None:
        return ""
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise bad_request(f"{param} must be a text or a list of blocks", param)
    texts = (_block(made, block, f"{param}[{n}]", lenient) for n, block in enumerate(content))
    return "\n".join(filter(None, texts))


def _block(made: Conversation, block: Any, param: str, lenient: bool) -> str:
    """The text of a block.

    Args:
        made: the conversation.
        block: of the request.
        param: where it stands.
        lenient: leave out a block without text: the client cannot take back what a tool or a model
            has said.
    """
    match block:
        case {"type": "text", "text": str(text)}:
            return _BILLING.sub("", text) if param.startswith("system") else text
        case {"type": "document", "source": {"type": "text", "data": str(text)}}:
            return text
        case {"type": str(kind)} if kind != "text" and lenient:
            made.leave_out(param, kind)
            return "" if kind == "redacted_thinking" else NO_TEXT % kind[:40]
        case {"type": str(kind)} if kind != "text":
            raise unsupported(f"{param}.type", f"{kind!r:.80}; the model reads text alone")
    raise bad_request(f"{param} must be a block with a type and its text", param)
