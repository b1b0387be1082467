"""Interface of a model's chat format to a server: prompts from messages, messages from text."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from dsa_compile.chat.parser import StreamParser


class ChatFormat(Protocol):
    """Chat format: how a model writes conversations.

    Attributes:
        name: for logs.
        special_tokens: strings that the tokenizer must know as one token each. Detokenise with them
            left in the text (``skip_special_tokens=False``), for a parser reads some of them; leave
            out the token that ended the turn.
        reads_calls: whether calls of tools are found in answers: the model writes them in a syntax
            that is known.
    """

    @property
    def name(self) -> str: ...  # noqa: D102

    @property
    def special_tokens(self) -> tuple[str, ...]: ...  # noqa: D102

    @property
    def reads_calls(self) -> bool: ...  # noqa: D102

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
        """The prompt of a conversation, beginning-of-sequence token included.

        Tokenise it without adding special tokens.

        Args:
            messages: in the form of OpenAI's API, with ``reasoning_content`` on assistant messages.
            tools: that the model may call.
            thinking: whether the answer begins with reasoning; None is the model's default.
            effort: how much reasoning, one of ``effort.EFFORTS``; the model gets its own level for
                it. None is its default; ``thinking`` and ``template_kwargs`` come before it.
            drop_thinking: leave out the reasoning of turns before the last user message; None is
                the model's default.
            response_format: OpenAI's; a JSON schema is shown to models whose format has a place
                for one.
            add_generation_prompt: end with the beginning of the assistant's answer. Without it the
                text ends where the last message does.
            template_kwargs: further options, by the names that the model's template gives them.

        Raises:
            ChatError: the request cannot be encoded; ``param`` names the field.
        """
        ...

    def forced_calls(
        self,
        prompt: str,
        tools: Sequence[Mapping[str, Any]],
        *,
        only: str | None = None,
        many: bool = True,
    ) -> dict[str, Any] | None:
        """A format of xgrammar's structural tags for answers that call a tool.

        Reasoning may come first where the prompt leaves room for it.

        Args:
            prompt: see :meth:`parser`.
            tools: that may be called.
            only: the one that shall be called; None for any of them.
            many: whether there may be several calls.

        Returns:
            The format; None if the model writes calls in no known syntax.

        Raises:
            ChatError: there is no such tool.
        """
        ...

    def parser(self, prompt: str, tools: Sequence[Mapping[str, Any]] | None = None) -> StreamParser:
        """A parser of one answer.

        Args:
            prompt: what :meth:`encode` gave; its end says whether the answer begins with reasoning.
            tools: that the model may call; without any, calls are plain text.
        """
        ...
