"""Conversations as prompts, and answers as messages, for the routes that chat."""

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from starlette.requests import Request

from dsa_compile.chat import ChatFormat, StreamParser
from dsa_compile.chat.template_format import TAGS
from dsa_compile.errors import RequestError
from dsa_compile.server.errors import bad_request, from_request_error
from dsa_compile.server.openai_types import SamplingFields
from dsa_compile.server.sampling import sampling_params
from dsa_compile.server.service import Job, Service
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


async def start_chat(
    service: Service,
    request: Request,
    body: SamplingFields,
    messages: Sequence[Mapping[str, Any]],
    choice: ToolChoice,
    *,
    answer_id: str,
    encoding: Mapping[str, Any],
    response_format: dict[str, Any] | None,
    many: bool,
    max_tokens: int | None,
    clamped: bool = False,
    logprobs: int | None = None,
) -> Job:
    """Queue the answers to a conversation, whichever API it comes by.

    Args:
        service: that serves it.
        request: of the client, who may leave meanwhile.
        body: of the request.
        messages: in the form of chats.
        choice: of tools.
        answer_id: of the HTTP request.
        encoding: further options of :meth:`dsa_compile.chat.ChatFormat.encode`.
        response_format: OpenAI's.
        many: whether an answer may have several calls; those after the first are left out else.
        max_tokens: most tokens of an answer; None for as many as fit.
        clamped: whether ``max_tokens`` may be more than fit.
        logprobs: alternatives to report with each token; None reports none.

    Raises:
        ApiError: it cannot be served.
    """
    text, prompt = await encode_chat(service, messages, tools=choice.tools, **encoding)
    form = chat_format_of(service)
    # What reasoning comes first is free.
    after = "</think>" if text.rstrip().endswith("<think>") else ""
    forced = choice.grammar(form, text, many)
    grammar = await service.grammar(request, body, response_format, after, forced)
    room = service.room(prompt)
    params = sampling_params(
        body,
        service.defaults,
        max_tokens=room if max_tokens is None else min(max_tokens, room if clamped else max_tokens),
        logprobs=logprobs,
        prompt_logprobs=body.prompt_logprobs,
        grammar=grammar,
    )
    tokenizer = AnswerTokenizer(service.text.tokenizer, body.skip_special_tokens)
    parser = partial(_parser, form, text, choice, None if many else 1)
    return service.start(answer_id, [prompt], [params], body, tokenizer, parser=parser)


def _parser(form: ChatFormat, prompt: str, choice: ToolChoice, most: int | None) -> StreamParser:
    parser = form.parser(prompt, choice.tools)
    parser.calls_only, parser.most_calls = choice.required, most
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
