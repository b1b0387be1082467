"""``POST /v1/chat/completions``."""

import time
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from dsa_compile.chat import (
    ContentDelta,
    Event,
    Finished,
    ReasoningDelta,
    ToolCallBegin,
    ToolCallDelta,
    ToolCallEnd,
    collect,
)
from dsa_compile.server.chat_text import start_chat
from dsa_compile.server.choice import Piece, finish
from dsa_compile.server.errors import bad_request
from dsa_compile.server.openai_types import ChatRequest
from dsa_compile.server.service import Job, Service, new_id
from dsa_compile.server.streaming import DONE, event, merged
from dsa_compile.server.token_text import chat_logprobs, prompt_logprobs
from dsa_compile.server.tool_choice import tool_choice
from dsa_compile.server.usage import chunk_usage, usage


def chat_router(service: Service) -> APIRouter:
    """The route."""
    router = APIRouter()

    @router.post("/v1/chat/completions")
    async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation."""
        service.check_common(body)
        service.check_count(body, body.n or 1)
        choice = tool_choice(body.tools, body.tool_choice)
        _refuse(service, body)
        answer_id = new_id("chatcmpl")
        job = await start_chat(
            service,
            request,
            body,
            body.messages,
            choice,
            answer_id=answer_id,
            encoding=body.encoding(),
            response_format=body.response_format,
            many=body.parallel_tool_calls is not False,
            max_tokens=_max_tokens(body),
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        )
        return await job.respond(request, _Answer(service, body, answer_id, job), body.stream)

    return router


def _refuse(service: Service, body: ChatRequest) -> None:
    if body.top_logprobs is not None:
        if not body.logprobs:
            raise bad_request("top_logprobs needs logprobs=true", "top_logprobs")
        service.check_logprobs(body.top_logprobs, "top_logprobs")


def _max_tokens(body: ChatRequest) -> int | None:
    given, old = body.max_completion_tokens, body.max_tokens
    if given is not None and old is not None and given != old:
        raise bad_request("max_tokens and max_completion_tokens differ", "max_tokens")
    return old if given is None else given


class _Answer:
    """The choices of a request in the form of the API."""

    def __init__(self, service: Service, body: ChatRequest, answer_id: str, job: Job) -> None:
        self._id = answer_id
        self._service = service
        self._body = body
        self._prompt = job.choices[0].prompt
        self._created = int(time.time())

    async def whole(self, job: Job) -> dict[str, Any]:
        events: list[list[Event]] = [[] for _ in job.choices]
        logprobs: list[list[Any]] = [[] for _ in job.choices]
        last: list[Piece | None] = [None] * len(job.choices)
        ids: list[list[int]] = [[] for _ in job.choices]
        async for choice, piece in merged(job.choices):
            ids[choice.index] += piece.token_ids
            events[choice.index] += piece.events
            logprobs[choice.index] += piece.logprobs
            last[choice.index] = piece
        choices: list[dict[str, Any]] = [
            {
                "index": index,
                "message": {**collect(found).message(), "refusal": None},
                "logprobs": self._logprobs(logprobs[index]),
                **finish(last[index], _called(found)),
            }
            for index, found in enumerate(events)
        ]
        counts = self._usage(job)
        answer = {**self._head("chat.completion"), "choices": choices, "usage": counts}
        if self._body.prompt_logprobs is not None:
            tokenizer, entries = self._service.text.tokenizer, job.choices[0].prompt_logprobs
            answer["prompt_logprobs"] = prompt_logprobs(tokenizer, entries)
        if self._body.return_token_ids:
            answer["prompt_token_ids"] = self._prompt
            for described, generated in zip(choices, ids, strict=True):
                described["token_ids"] = generated
        return answer

    async def events(self, job: Job) -> AsyncGenerator[bytes, None]:
        head = self._head("chat.completion.chunk")
        options = self._body.stream_options
        prompt = {"prompt_token_ids": self._prompt} if self._body.return_token_ids else {}
        for choice in job.choices:
            first = _chunk(choice.index, {"role": "assistant", "content": ""}, None, finish(None))
            counts = chunk_usage(options, choice, 0)
            yield event({**head, **prompt, **counts, "choices": [first]})
        async for choice, piece in merged(job.choices):
            counts = chunk_usage(options, choice, choice.reasoning_tokens)
            for chunk in self._chunks(choice.index, piece):
                yield event({**head, **counts, "choices": [chunk]})
        if options is not None and options.include_usage:
            yield event({**head, "choices": [], "usage": self._usage(job)})
        yield DONE

    def _chunks(self, index: int, piece: Piece) -> Iterator[dict[str, Any]]:
        found = piece.events
        logprobs = self._logprobs(piece.logprobs)
        ids = piece.token_ids if self._body.return_token_ids else []
        for delta in filter(None, map(_delta, found)):
            yield _chunk(index, delta, logprobs, finish(None), ids)
            logprobs, ids = None, []  # once, whatever came of the piece
        ended = piece.finish_reason is not None
        if ended or ids or (logprobs is not None and piece.logprobs):
            yield _chunk(index, {}, logprobs, finish(piece, _called(found)), ids)

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._service.model,
        }

    def _usage(self, job: Job) -> dict[str, Any]:
        reasoning = sum(choice.reasoning_tokens for choice in job.choices)
        return usage([self._prompt], job.choices, reasoning)

    def _logprobs(self, entries: Sequence[Any]) -> dict[str, Any] | None:
        if not self._body.logprobs:
            return None
        return chat_logprobs(self._service.text.tokenizer, entries, self._body.top_logprobs or 0)


def _called(events: Iterable[Event]) -> bool:
    return any(isinstance(found, Finished) and found.called for found in events)


def _delta(found: Event) -> dict[str, Any] | None:
    match found:
        case ContentDelta(text):
            return {"content": text}
        case ReasoningDelta(text):
            return {"reasoning_content": text}
        case ToolCallBegin(index, call_id, name):
            function = {"name": name, "arguments": ""}
            call = {"index": index, "id": call_id, "type": "function", "function": function}
            return {"tool_calls": [call]}
        case ToolCallDelta(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
        case ToolCallEnd() | Finished():
            return None


def _chunk(
    index: int,
    delta: dict[str, Any],
    logprobs: Any,
    end: dict[str, Any],
    token_ids: Sequence[int] = (),
) -> dict[str, Any]:
    chunk = {"index": index, "delta": delta, "logprobs": logprobs, **end}
    return {**chunk, "token_ids": token_ids} if token_ids else chunk
