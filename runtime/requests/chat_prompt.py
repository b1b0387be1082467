"""A conversation as a prompt, and the answer to it."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict, Unpack

from dsa_compile.chat import Answer, ChatFormat, Event, ParsedCall, StreamParser
from dsa_compile.chat.effort import EFFORTS
from dsa_compile.errors import ChatError, RequestError
from dsa_compile.runtime.requests.outputs import RequestOutput


class ChatOptions(TypedDict, total=False):
    """Options of a conversation.

    Attributes:
        tools: that the model may call.
        thinking: whether the answer begins with reasoning; None is the model's default.
        effort: how much reasoning: ``none``, ``minimal``, ``low``, ``medium``, ``high``, ``xhigh``
            or ``max``, for which the model gets its own level. None is its default; ``thinking``
            and ``template_kwargs`` come before it.
        drop_thinking: leave out the reasoning of earlier turns; None is the model's default.
        response_format: OpenAI's; the answer is not forced to follow it.
        template_kwargs: further options, by the names that the model's template gives them.
    """

    tools: Sequence[Mapping[str, Any]] | None
    thinking: bool | None
    effort: str | None
    drop_thinking: bool | None
    response_format: Mapping[str, Any] | None
    template_kwargs: Mapping[str, Any] | None


@dataclass(frozen=True)
class ChatPrompt:
    """A conversation in a model's chat format; every method that takes a prompt takes it.

    The text generated for it keeps its special tokens, which :meth:`parser` reads.

    Attributes:
        text: the prompt, special tokens included.
        token_ids: the same as tokens.
    """

    text: str
    token_ids: list[int]
    _format: ChatFormat = field(repr=False)
    _tools: Sequence[Mapping[str, Any]] | None = field(default=None, repr=False)

    def parser(self) -> StreamParser:
        """A parser of one answer's text, in pieces."""
        return self._format.parser(self.text, self._tools)

    def parse(self, text: str, cut: bool = False) -> Answer:
        """Reasoning, content and tool calls of a whole answer; ``cut`` if it breaks off."""
        return self.parser().parse(text, cut)

    def events(self, outputs: Iterable[RequestOutput]) -> Iterator[Event]:
        """Reasoning, content and tool calls as they come.

        Args:
            outputs: of a request with this prompt, such as :meth:`Engine.stream` gives.
        """
        parser = self.parser()
        cut = True
        for output in outputs:
            yield from parser.feed(output.new_text or "")
            cut = output.finish_reason != "stop"
        yield from parser.finish(cut)


@dataclass(frozen=True)
class ChatOutput:
    """The answer to a conversation.

    Attributes:
        answer: parsed.
        output: tokens, raw text, finish reason.
    """

    answer: Answer
    output: RequestOutput

    @property
    def content(self) -> str:
        """The answer's text."""
        return self.answer.content

    @property
    def reasoning(self) -> str:
        """Reasoning of the model before the answer; may be empty."""
        return self.answer.reasoning

    @property
    def tool_calls(self) -> tuple[ParsedCall, ...]:
        """The answer's calls, in order."""
        return self.answer.tool_calls

    @property
    def message(self) -> dict[str, Any]:
        """The answer as an assistant message of OpenAI's API, to append to the conversation."""
        return self.answer.message()

    @property
    def finish_reason(self) -> str | None:
        """Finish reason as in OpenAI's API: ``tool_calls`` where a complete call was made."""
        if any(call.complete for call in self.tool_calls):
            return "tool_calls"
        return self.output.finish_reason


def encode_chat(
    form: ChatFormat | None,
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    **options: Unpack[ChatOptions],
) -> ChatPrompt:
    """Encode a conversation.

    Args:
        form: the model's chat format; None if it has none.
        tokenizer: has ``encode(text, add_special_tokens=...).ids`` and ``token_to_id``; or None.
        messages: in the form of OpenAI's API.
        **options: see :class:`ChatOptions`.

    Raises:
        ChatError: the conversation cannot be encoded.
        RequestError: there is no chat format or no tokenizer, or the tokenizer does not know a
            token of the format.
    """
    if form is None:
        raise RequestError(
            "the model has no chat format (no chat template, and none is built in for its type); "
            "give a prompt instead of a conversation"
        )
    if tokenizer is None:
        raise RequestError("a conversation needs a tokenizer and this engine has none")
    missing = [token for token in form.special_tokens if tokenizer.token_to_id(token) is None]
    if missing:
        raise RequestError(
            f"the tokenizer does not know {missing[0]!r} of the model's chat format ({form.name}); "
            "give a prompt instead of a conversation"
        )
    if (effort := options.get("effort")) is not None and effort not in EFFORTS:
        raise ChatError("effort", f"must be one of {', '.join(EFFORTS)}; got {effort!r}")
    text = form.encode(messages, **options)
    # the text has its beginning-of-sequence token already
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ChatPrompt(text, ids, form, options.get("tools"))
