"""``POST /v1/responses``: a conversation in, reasoning, text and calls out; nothing is kept."""

import time
from collections.abc import AsyncGenerator, Iterator
from typing import Any, get_args

from fastapi import APIRouter, Request
from starlette.responses import Response

from dsa_compile.server.answer_parts import AnswerParts
from dsa_compile.server.chat_text import start_chat
from dsa_compile.server.choice import Choice, Piece
from dsa_compile.server.errors import ApiError, bad_request, unsupported
from dsa_compile.server.field_types import Effort
from dsa_compile.server.openai_types import ResponsesRequest
from dsa_compile.server.prompt_encoding import in_thread
from dsa_compile.server.response_input import (
    conversation_of,
    response_format_of,
    tools_of,
)
from dsa_compile.server.response_output import make_item, new_id
from dsa_compile.server.service import Job, Service
from dsa_compile.server.streaming import typed_event
from dsa_compile.server.tool_choice import tool_choice

_KNOWN_INCLUDES = ("reasoning.encrypted_content",)  # reasoning is there as text


def responses_router(service: Service) -> APIRouter:
    """The route."""
    router = APIRouter()

    @router.post("/v1/responses")
    async def create_response(body: ResponsesRequest, request: Request) -> Response:
        """Answer a conversation."""
        service.check_common(body)
        service.check_one(body)
        _refuse(body)
        size = len(body.input)
        conversation = await in_thread(size, conversation_of, body.input, body.instructions)
        answer = _Answer(service, body)
        try:
            job = await start_chat(
                service,
                request,
                body,
                conversation.messages,
                tool_choice(tools_of(body.tools, conversation), body.tool_choice),
                answer_id=answer.id,
                encoding={
                    "effort": _effort(body.reasoning),
                    "template_kwargs": body.chat_template_kwargs,
                },
                response_format=response_format_of(body.text, conversation),
                many=body.parallel_tool_calls is not False,
                max_tokens=body.max_output_tokens,
            )
        except ApiError as error:
            raise conversation.own_name(error) from None
        return await job.respond(request, answer, body.stream, conversation.headers())

    return router


def _refuse(body: ResponsesRequest) -> None:
    if body.previous_response_id is not None:
        raise unsupported("previous_response_id", "answers are not kept; send them in input")
    if body.background:
        raise unsupported("background", "answers are not kept")
    if body.truncation not in (None, "disabled"):
        raise unsupported("truncation", "a prompt that is too long is refused")
    for name in body.include or ():
        if name not in _KNOWN_INCLUDES:
            raise unsupported("include", f"{name!r:.80} is nothing that this server has")


def _effort(reasoning: dict[str, Any] | None) -> str | None:
    for name in reasoning or ():
        if name not in ("effort", "summary", "generate_summary"):
            raise unsupported(f"reasoning.{name}", "use reasoning.effort")
    effort: str | None = (reasoning or {}).get("effort")
    if effort not in (None, *get_args(Effort)):
        known = ", ".join(get_args(Effort))
        raise bad_request(f"reasoning.effort must be one of {known}", "reasoning.effort")
    return effort


class _Answer:
    """One response, whole or as the events of a stream."""

    def __init__(self, service: Service, body: ResponsesRequest) -> None:
        self.id = new_id("resp")
        self._output = AnswerParts(make_item)
        self._number = 0
        default = service.defaults
        self._head = {
            "id": self.id, "object": "response", "created_at": int(time.time()),
            "model": service.model, "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens, "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None, "store": False, "background": False,
            "reasoning": {"effort": _effort(body.reasoning), "summary": None},
            "temperature": default.temperature if body.temperature is None else body.temperature,
            "top_p": default.top_p if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "text": body.text or {"format": {"type": "text"}},
            "tool_choice": body.tool_choice or "auto", "tools": body.tools or [],
            "user": body.user,
        }  # fmt: skip

    async def whole(self, job: Job) -> dict[str, Any]:
        (choice,) = job.choices
        reason: str | None = None
        async for piece in choice.pieces():
            for _ in self._take(piece):
                pass
            reason = piece.finish_reason
        return self._ended(choice, reason)

    async def events(self, job: Job) -> AsyncGenerator[bytes, None]:
        (choice,) = job.choices
        begun = self._described("in_progress")
        yield self._event({"type": "response.created", "response": begun})
        yield self._event({"type": "response.in_progress", "response": begun})
        reason: str | None = None
        try:
            async for piece in choice.pieces():
                reason = piece.finish_reason
                if found := b"".join(map(self._event, self._take(piece))):
                    yield found
        except ApiError as error:
            problem = {"code": error.code or "server_error", "message": error.message}
            failed = {**self._described("failed"), "error": problem}
            yield self._event({"type": "response.failed", "response": failed})
            return
        ended = self._ended(choice, reason)
        yield self._event({"type": f"response.{ended['status']}", "response": ended})

    def _take(self, piece: Piece) -> Iterator[dict[str, Any]]:
        yield from self._output.add(piece.events, cut=piece.finish_reason == "length")

    def _ended(self, choice: Choice, reason: str | None) -> dict[str, Any]:
        cut = reason == "length"
        counts = {
            "input_tokens": len(choice.prompt),
            "input_tokens_details": {"cached_tokens": choice.cached_tokens},
            "output_tokens": choice.num_tokens,
            "output_tokens_details": {"reasoning_tokens": choice.reasoning_tokens},
            "total_tokens": len(choice.prompt) + choice.num_tokens,
        }
        answer = {**self._described("incomplete" if cut else "completed"), "usage": counts}
        if cut:
            answer["incomplete_details"] = {"reason": "max_output_tokens"}
        return answer

    def _described(self, status: str) -> dict[str, Any]:
        return {
            **self._head,
            "status": status,
            "output": [dict(item.content) for item in self._output.parts],
            "error": None,
            "incomplete_details": None,
            "usage": None,
        }

    def _event(self, content: dict[str, Any]) -> bytes:
        numbered = {"sequence_number": self._number, **content}
        self._number += 1
        return typed_event(numbered)
