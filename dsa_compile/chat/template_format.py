"""The chat format of a model that ships a Jinja template, GLM-5 among them."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from dsa_compile.chat.deepseek_v31 import DEEPSEEK_V31
from dsa_compile.chat.deepseek_v31 import TAGS as V31_TAGS
from dsa_compile.chat.dsml import DSML
from dsa_compile.chat.effort import is_off, template_efforts
from dsa_compile.chat.forced_calls import forced_calls
from dsa_compile.chat.glm import GLM
from dsa_compile.chat.grammar import CallGrammar
from dsa_compile.chat.json_text import checked_text, to_json
from dsa_compile.chat.messages import Message, parse_messages
from dsa_compile.chat.parser import StreamParser
from dsa_compile.chat.reasoning import THINK, THINK_END, answer_thinks
from dsa_compile.chat.results import pair_results
from dsa_compile.chat.template import ChatTemplate
from dsa_compile.chat.tools import callable_tools, parse_tools
from dsa_compile.errors import ChatError

# Syntax of calls by the tags that a template writes them with.
_GRAMMARS: dict[str, CallGrammar] = {
    "<｜DSML｜": DSML,
    "<arg_key>": GLM,
    "<｜tool▁sep｜>": DEEPSEEK_V31,
}
_FENCED = "```json"  # DeepSeek-V3 and R1 write arguments so, between the same tags
TAGS = (  # that parsers read
    THINK, THINK_END, "｜DSML｜", "<tool_call>", "</tool_call>",
    "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", *V31_TAGS,
)  # fmt: skip
# A conversation that shows in which form a template takes a call's arguments.
_PROBE = parse_messages(
    [
        {"role": "user", "content": "question"},
        {
            "role": "assistant",
            "tool_calls": [{"id": "1", "function": {"name": "probe", "arguments": '{"key": "x"}'}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "result"},
    ]
)
_SET_HERE = ("messages", "tools", "add_generation_prompt")


class TemplateFormat:
    """Prompts from a template; answers by the tags that the template writes.

    Args:
        template: for conversations.
        tool_template: for conversations with tools, where the model ships another one for these.
        special_tokens: variables of the template, such as ``bos_token``.
    """

    name = "template"

    @property
    def reads_calls(self) -> bool:
        """See :class:`dsa_compile.chat.formats.ChatFormat`."""
        return self._grammar is not None

    def __init__(
        self,
        template: ChatTemplate,
        tool_template: ChatTemplate | None = None,
        special_tokens: Mapping[str, str] | None = None,
    ) -> None:
        self._template = template
        self._tool_template = tool_template or template
        self._variables = dict(special_tokens or {})
        source = self._tool_template.source
        known = (grammar for tag, grammar in _GRAMMARS.items() if tag in source)
        self._grammar = None if _FENCED in source else next(known, None)
        self.special_tokens = tuple(tag for tag in TAGS if tag in source)
        self._takes_text = self._writes_only_text()
        self._known_efforts: dict[ChatTemplate, tuple[dict[str, str], bool]] = {}

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
        """See :meth:`dsa_compile.chat.formats.ChatFormat.encode`.

        ``thinking`` sets the template's ``enable_thinking`` and ``thinking``, ``effort`` these and
        its ``reasoning_effort``, ``drop_thinking`` its ``clear_thinking``; templates have no place
        for ``response_format``.
        """
        offered = parse_tools(tools)
        template = self._tool_template if offered else self._template
        variables: dict[str, Any] = dict(self._variables)
        if effort is not None:
            variables |= self._reasoning(template, effort)
        if thinking is not None:
            variables |= _switch(thinking)
        if drop_thinking is not None:
            variables["clear_thinking"] = drop_thinking
        for name, value in (template_kwargs or {}).items():
            if name in _SET_HERE or name in self._variables:
                raise ChatError(f"chat_template_kwargs.{name}", "is set by the server")
            to_json(value, f"chat_template_kwargs.{name}")
            variables[name] = value
        variables |= {
            "messages": [
                _as_dict(message, template, self._takes_text)
                for message in pair_results(parse_messages(messages))
            ],
            "tools": [dict(tool.definition) for tool in offered] or None,
            "add_generation_prompt": add_generation_prompt,
        }
        return checked_text(template.render(variables), "messages")

    def parser(self, prompt: str, tools: Sequence[Mapping[str, Any]] | None = None) -> StreamParser:
        """See :meth:`dsa_compile.chat.formats.ChatFormat.parser`."""
        return StreamParser(answer_thinks(prompt), parse_tools(tools), self._grammar)

    def forced_calls(
        self,
        prompt: str,
        tools: Sequence[Mapping[str, Any]],
        *,
        only: str | None = None,
        many: bool = True,
    ) -> dict[str, Any] | None:
        """See :meth:`dsa_compile.chat.formats.ChatFormat.forced_calls`."""
        if self._grammar is None:
            return None
        return forced_calls(self._grammar, answer_thinks(prompt), callable_tools(tools, only), many)

    def _reasoning(self, template: ChatTemplate, effort: str) -> dict[str, Any]:
        """Variables of a template that ask for an effort."""
        efforts, off = self._efforts(template)
        own = efforts.get(effort)
        wanted = not is_off(effort, own)
        if effort == "none" and not off:
            graded = ", ".join(dict.fromkeys(efforts.values())) or "on"
            raise ChatError("reasoning_effort", f"the model always reasons; its levels: {graded}")
        variables: dict[str, Any] = _switch(wanted or not off)
        if own is not None and (wanted or not off or own == effort):
            variables["reasoning_effort"] = own
        return variables

    def _efforts(self, template: ChatTemplate) -> tuple[dict[str, str], bool]:
        """A template's levels of reasoning, and whether it can leave reasoning out."""
        if template not in self._known_efforts:
            efforts: dict[str, str] = {}
            if "reasoning_effort" in template.source:
                opening = partial(self._opening, template, True)
                efforts = template_efforts(lambda effort: opening(reasoning_effort=effort))
            off = "none" in efforts or not answer_thinks(self._opening(template, False) or "")
            self._known_efforts[template] = efforts, off
        return self._known_efforts[template]

    def _opening(self, template: ChatTemplate, thinking: bool, **variables: Any) -> str | None:
        """The prompt of a question; None where the template refuses the variables."""
        variables |= {**self._variables, **_switch(thinking), "add_generation_prompt": True}
        variables["messages"] = [{"role": "user", "content": "Hello"}]
        try:
            return template.render(variables)
        except ChatError:
            return None

    def _writes_only_text(self) -> bool:
        """Whether the template needs a call's arguments as JSON text, as DeepSeek-V3.1's does.

        Most templates take an object. The others fail on one, or write it as Python would.
        """

        def written(as_text: bool) -> str:
            messages = [_as_dict(message, self._tool_template, as_text) for message in _PROBE]
            try:
                return self._tool_template.render({**self._variables, "messages": messages})
            except ChatError:
                return ""

        objects = written(as_text=False)
        return (not objects or "{'key'" in objects) and '{"key"' in written(as_text=True)


def _switch(thinking: bool) -> dict[str, Any]:
    """Variables of templates that turn reasoning on or off."""
    return {"enable_thinking": thinking, "thinking": thinking}


def _as_dict(message: Message, template: ChatTemplate, as_text: bool) -> dict[str, Any]:
    """The message as a template expects it; ``as_text`` asks for arguments as JSON text."""
    shown = dict(message.source or {})
    shown["content"] = message.content
    if message.role == "developer" and "developer" not in template.source:
        shown["role"] = "system"  # which would be left out without a word
    for field in ("reasoning", "reasoning_content", "tool_calls"):
        shown.pop(field, None)
    if message.reasoning:
        shown["reasoning_content"] = message.reasoning
    if message.tool_calls:
        shown["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": to_json(call.arguments, message.param)
                    if as_text
                    else dict(call.arguments),
                },
            }
            for call in message.tool_calls
        ]
    return shown
