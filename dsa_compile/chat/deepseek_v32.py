"""The chat format published with DeepSeek-V3.2.

A prompt is the begin-of-sentence token, then the messages::

    system      text, then the tools prompt, then the response format
    user        <｜User｜>text, and the opening of the answer: <｜Assistant｜><think>
    assistant   reasoning</think>text, calls, end of sentence
    tool        <function_results> with one <result> a call, and the opening of the answer: <think>

An answer without reasoning is opened with ``</think>`` instead. ``docs/chat.md`` lists where the
published encoder leaves a choice, and what is chosen here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dsa_compile.chat.dsml import DSML, write_calls
from dsa_compile.chat.effort import is_off
from dsa_compile.chat.forced_calls import forced_calls
from dsa_compile.chat.json_text import to_json
from dsa_compile.chat.messages import Message, parse_messages
from dsa_compile.chat.parser import StreamParser
from dsa_compile.chat.reasoning import THINK, THINK_END, answer_thinks
from dsa_compile.chat.results import pair_results
from dsa_compile.chat.tools import callable_tools, parse_tools
from dsa_compile.errors import ChatError

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
USER = "<｜User｜>"
ASSISTANT = "<｜Assistant｜>"

# The published prompt, blank lines included.
TOOLS_PROMPT = """## Tools

You have access to a set of tools you can use to answer the user's question.
You can invoke functions by writing a "<｜DSML｜function_calls>" block like the following as part \
of your reply to the user:
<｜DSML｜function_calls>
<｜DSML｜invoke name="$FUNCTION_NAME">
<｜DSML｜parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</｜DSML｜parameter>
...
</｜DSML｜invoke>
<｜DSML｜invoke name="$FUNCTION_NAME2">
...
</｜DSML｜invoke>
</｜DSML｜function_calls>

String and scalar parameters should be specified as is without any escaping or quotes, while lists \
and objects should use JSON format. The "string" attribute should be set to "true" for string type \
parameters and "false" for other types (numbers, booleans, arrays, objects).

If the thinking_mode is enabled, then after function results you should strongly consider \
outputting a thinking block. Here is an example:

<｜DSML｜function_calls>
...
</｜DSML｜function_calls>

<function_results>
...
</function_results>

<think>...thinking about results</think>

Here are the functions available in JSONSchema format:
<functions>
%s
</functions>
"""
RESPONSE_FORMAT = """## Response Format:

You MUST strictly adhere to the following schema to reply:
"""
_OPTIONS = ("thinking", "enable_thinking", "drop_thinking")


@dataclass(frozen=True)
class _Opening:
    """The opening of an answer, written once it is known what follows.

    Attributes:
        prefix: before ``<think>`` or ``</think>``.
        index: of the message that asks for the answer.
    """

    prefix: str
    index: int


class DeepSeekV32Format:
    """The encoding of DeepSeek-V3.2 and the parser of its answers."""

    name = "deepseek_v32"
    reads_calls = True
    special_tokens = (BOS, EOS, USER, ASSISTANT, THINK, THINK_END, "｜DSML｜")

    def encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        thinking: bool | None = None,
        effort: str | None = None,
        drop_thinking: bool | None = None,
        response_format: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """See :meth:`dsa_compile.chat.formats.ChatFormat.encode`; without thinking by default."""
        given = _options(template_kwargs or {})
        if thinking is None:
            asked = effort is not None and not is_off(effort)
            thinking = given.get("thinking", given.get("enable_thinking", asked))
        if drop_thinking is None:
            drop_thinking = given.get("drop_thinking", True)
        turns = pair_results(parse_messages(messages))
        if add_generation_prompt and turns[-1].role == "assistant":
            raise ChatError(turns[-1].param, "the last message must not be the assistant's")
        turns = _with_request(turns, tools, response_format)
        return _Writer(turns, thinking, drop_thinking).write(add_generation_prompt)

    def parser(self, prompt: str, tools: Sequence[Mapping[str, Any]] | None = None) -> StreamParser:
        """See :meth:`dsa_compile.chat.formats.ChatFormat.parser`."""
        return StreamParser(answer_thinks(prompt), parse_tools(tools), DSML)

    def forced_calls(
        self,
        prompt: str,
        tools: Sequence[Mapping[str, Any]],
        *,
        only: str | None = None,
        many: bool = True,
    ) -> dict[str, Any] | None:
        """See :meth:`dsa_compile.chat.formats.ChatFormat.forced_calls`."""
        return forced_calls(DSML, answer_thinks(prompt), callable_tools(tools, only), many)


class _Writer:
    """Writes messages one after another."""

    def __init__(self, turns: Sequence[Message], thinking: bool, drop_thinking: bool) -> None:
        self._turns = turns
        self._thinking = thinking
        self._drop_thinking = drop_thinking
        asking = [i for i, turn in enumerate(turns) if turn.role in ("user", "developer")]
        self._last_user = asking[-1] if asking else -1
        self._opening: _Opening | None = None
        self._parts = [BOS]

    def write(self, add_generation_prompt: bool) -> str:
        for index, turn in enumerate(self._turns):
            getattr(self, f"_{turn.role}")(index, turn)
        if add_generation_prompt:
            # after system messages alone nothing has asked for an answer yet
            self._opening = self._opening or _Opening(ASSISTANT, len(self._turns))
            self._open(None)
        return "".join(self._parts)

    def _open(self, reply: Message | None) -> bool:
        """Write the opening that is due, if any; returns whether it began reasoning."""
        if self._opening is None:
            return False
        current = self._opening.index >= self._last_user
        kept = not self._drop_thinking and reply is not None and reply.reasoning != ""
        thinks = self._thinking and (current or kept)
        self._parts.append(self._opening.prefix + (THINK if thinks else THINK_END))
        self._opening = None
        return thinks

    def _system(self, index: int, turn: Message) -> None:
        # Before an opening that is due: inside the answer it would read as the assistant's words.
        separator = "\n\n" if self._opening is not None else ""
        self._parts.append(separator + turn.content + _tools_and_format(turn))

    def _user(self, index: int, turn: Message) -> None:
        self._open(None)
        self._parts.append(USER + turn.content)
        self._opening = _Opening(ASSISTANT, index)

    def _developer(self, index: int, turn: Message) -> None:
        text = f"{_tools_and_format(turn)}\n\n# The user's message is: {turn.content}"
        self._user(index, replace(turn, content=text))

    def _assistant(self, index: int, turn: Message) -> None:
        thinks = self._open(turn)
        reasoning = turn.reasoning + THINK_END if thinks else ""
        calls = f"\n\n{write_calls(turn)}" if turn.tool_calls else ""
        self._parts.append(f"{reasoning}{turn.content}{calls}{EOS}")

    def _tool(self, index: int, turn: Message) -> None:
        before = self._turns[index - 1]
        first = before.role != "tool"
        if first:
            self._parts.append("\n\n<function_results>")
        # a result's place says which call it answers, so one that is missing leaves an empty one
        missing = turn.slot - (0 if first else before.slot + 1)
        self._parts.append("\n<result></result>" * missing + f"\n<result>{turn.content}</result>")
        if index + 1 == len(self._turns) or self._turns[index + 1].role != "tool":
            self._parts.append("\n</function_results>")
            self._opening = _Opening("\n\n", index)


def _options(template_kwargs: Mapping[str, Any]) -> dict[str, bool]:
    for name, value in template_kwargs.items():
        param = f"chat_template_kwargs.{name}"
        if name not in _OPTIONS:
            raise ChatError(
                param, f"DeepSeek-V3.2 has no such option; it has {', '.join(_OPTIONS)}"
            )
        if not isinstance(value, bool):
            raise ChatError(param, f"should be true or false, found {value!r:.80}")
    return dict(template_kwargs)


def _with_request(
    turns: list[Message],
    tools: Sequence[Mapping[str, Any]] | None,
    response_format: Mapping[str, Any] | None,
) -> list[Message]:
    """The request's tools and response format as the first system message's, made if need be."""
    offered = parse_tools(tools)
    schema = _schema(response_format)
    if not offered and schema is None:
        return turns
    if turns[0].role != "system":
        turns = [Message("messages", "system", ""), *turns]
    first = turns[0]
    merged = replace(
        first,
        tools=(*first.tools, *offered),
        response_format=first.response_format if schema is None else schema,
    )
    return [merged, *turns[1:]]


def _schema(response_format: Mapping[str, Any] | None) -> Any:
    if response_format is None:
        return None
    kind = response_format.get("type") if isinstance(response_format, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    if kind != "json_schema":
        raise ChatError(
            "response_format.type",
            f"should be text, json_object or json_schema; found {kind!r:.80}",
        )
    inner = response_format.get("json_schema")
    schema = inner.get("schema") if isinstance(inner, Mapping) else None
    if not isinstance(schema, Mapping | bool):
        raise ChatError("response_format.json_schema.schema", "should be a JSON schema, an object")
    return schema


def _tools_and_format(turn: Message) -> str:
    text = ""
    if turn.tools:
        lines = [
            to_json(tool.function, f"{turn.param}.tools[{i}]") for i, tool in enumerate(turn.tools)
        ]
        text += "\n\n" + TOOLS_PROMPT % "\n".join(lines)
    if turn.response_format:
        schema = to_json(turn.response_format, f"{turn.param}.response_format")
        text += f"\n\n{RESPONSE_FORMAT}{schema}"
    return text
