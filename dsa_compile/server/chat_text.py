"""Conversations as prompts, and answers as messages, for the routes that chat."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from dsa_compile.chat import ChatFormat, StreamParser
from dsa_compile.chat.template_format import TAGS
from dsa_compile.errors import RequestError
from dsa_compile.server.errors import bad_request, from_request_error
from dsa_compile.server.service import Service
from dsa_compile.server.tool_choice import ToolChoice


class AnswerTokenizer:
    """Decodes an answer for its parser: with the tags that it reads, without other special tokens.

    Args:
        tokenizer: a ``tokenizers.Tokenizer``.
        skip_special_tokens: leave out special tokens that are no tags.
    """

    def __init__(self, tokenizer: Any, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._hidden: frozenset[int] = frozenset()
        if skip_special_tokens:
            added = tokenizer.get_added_tokens_decoder().items()
            self._hidden = frozenset(
                id_ for id_, token in added if token.special and token.content not in TAGS
            )

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """Text of the tokens."""
        if not self._hidden.isdisjoint(ids):
            ids = [id_ for id_ in ids if id_ not in self._hidden]
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        return text


async def encode_chat(
    service: Service, messages: Sequence[Mapping[str, Any]], **options: Any
) -> tuple[str, list[int]]:
    """The prompt of a conversation, as text and as token ids.

    Args:
        service: that serves it.
        messages: of the request.
        **options: of :meth:`dsa_compile.chat.ChatFormat.encode`.

    Raises:
        ApiError: it cannot be encoded (400).
    """
    form = chat_format_of(service)
    try:
        text = await asyncio.to_thread(form.encode, messages, **options)
    except RequestError as error:
        raise from_request_error(error) from None
    return text, await service.encode(text, "messages", special=False)


def answer_parser(service: Service, prompt: str, choice: ToolChoice) -> StreamParser:
    """A parser of one answer to a prompt."""
    parser = chat_format_of(service).parser(prompt, choice.tools)
    parser.calls_only = choice.required
    return parser


def chat_format_of(service: Service) -> ChatFormat:
    """The model's chat format.

    Raises:
        ApiError: it has none (400).
    """
    if service.text.chat is None:
        problem = f"the model has no chat format: {service.text.no_chat}; use /v1/completions"
        raise bad_request(problem, "messages")
    return service.text.chat
