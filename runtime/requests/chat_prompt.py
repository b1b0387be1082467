"""A conversation as a prompt, and the answer to it."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dsa_compile.chat import Answer, ChatFormat, Event, ParsedCall, StreamParser
from dsa_compile.errors import RequestError
from dsa_compile.runtime.requests.outputs import RequestOutput


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
    tools: Sequence[Mapping[str, Any]] | None = None,
    **options: Any,
) -> ChatPrompt:
    """Encode a conversation.

    Args:
        form: the model's chat format; None if it has none.
        tokenizer: has ``encode(text, add_special_tokens=...).ids`` and ``token_to_id``; or None.
        messages: in the form of OpenAI's API.
        tools: that the model may call.
        **options: others of :meth:`ChatFormat.encode`.

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
    text = form.encode(messages, tools=tools, **options)
    # the text has its beginning-of-sequence token already
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ChatPrompt(text, ids, form, tools)
