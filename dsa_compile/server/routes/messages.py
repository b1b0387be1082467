"""``POST /v1/messages``: Anthropic's Messages API, and its count of a prompt's tokens."""

import json
from collections.abc import AsyncGenerator, Iterator
from functools import partial

from fastapi import APIRouter, Request
from starlette.responses import Response

from dsa_compile.chat import ContentDelta, Event, Finished, ReasoningDelta, ToolCallBegin, collect
from dsa_compile.server.answer_parts import AnswerParts, Begun, Json
from dsa_compile.server.chat_text import encode_chat, start_chat
from dsa_compile.server.choice import Choice, Piece, finish
from dsa_compile.server.errors import ApiError
from dsa_compile.server.messages_input import conversation_of, tool_choice_of, tools_of
from dsa_compile.server.openai_types import AnsweredMessagesRequest, MessagesRequest
from dsa_compile.server.response_output import new_id
from dsa_compile.server.service import Job, Service
from dsa_compile.server.streaming import JsonResponse, typed_event
from dsa_compile.server.tool_choice import tool_choice

_STOPS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_DELTAS = {
    "thinking": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "tool_use": ("input_json_delta", "partial_json"),
}


def messages_router(service: Service) -> APIRouter:
    """The routes."""
    router = APIRouter()

    @router.post("/v1/messages")
    async def create_message(body: AnsweredMessagesRequest, request: Request) -> Response:
        """Answer a conversation."""
        service.check_common(body)
        service.check_one(body)
        body.stop = body.stop_sequences or body.stop
        made = conversation_of(body)
        answer = _Answer(service, body)
        try:
            job = await start_chat(
                service,
                request,
                body,
                made.messages,
                tool_choice(tools_of(made, body.tools), tool_choice_of(body.tool_choice)),
                answer_id=answer.id,
                encoding=body.encoding(),
                response_format=body.response_format(),
                many=not (body.tool_choice or {}).get("disable_parallel_tool_use"),
                max_tokens=body.max_tokens,
                clamped=True,
            )
        except ApiError as error:
            if error.code == "context_length_exceeded":
                error.message = f"prompt is too long: {error.message}"  # clients look for the words
            raise made.own_name(error) from None
        return await job.respond(request, answer, body.stream, made.headers())

    @router.post("/v1/messages/count_tokens")
    async def count_tokens(body: MessagesRequest) -> Response:
        """Count the tokens of the prompt that a conversation becomes."""
        service.check_model(body.model)
        made = conversation_of(body)
        try:
            choice = tool_choice(tools_of(made, body.tools), tool_choice_of(body.tool_choice))
            options = {"tools": choice.tools, **body.encoding()}
            _, prompt = await encode_chat(service, made.messages, **options)
        except ApiError as error:
            raise made.own_name(error) from None
        return JsonResponse({"input_tokens": len(prompt)}, headers=made.headers())

    return router


class _Answer:
    """One message, whole or as the events of a stream."""

    def __init__(self, service: Service, body: AnsweredMessagesRequest) -> None:
        self.id = new_id("msg")
        self._model = body.model or service.model
        self._most = body.max_tokens
        self._blocks = AnswerParts(partial(_Block, self.id))

    async def whole(self, job: Job) -> Json:
        (choice,) = job.choices
        found: list[Event] = []
        async for piece in choice.pieces():
            found += piece.events
        answer = collect(found)
        blocks: list[Json] = []
        if answer.reasoning:
            thought = {"type": "thinking", "thinking": answer.reasoning, "signature": self.id}
            blocks.append(thought)
        if answer.content:
            blocks.append({"type": "text", "text": answer.content})
        for call in answer.tool_calls:
            if call.complete:  # half a call must not be carried out
                block = {"type": "tool_use", "id": call.id, "name": call.name}
                blocks.append({**block, "input": json.loads(call.arguments)})
        return {**self._message(choice), "content": blocks, **self._end(choice, piece)}

    async def events(self, job: Job) -> AsyncGenerator[bytes, None]:
        (choice,) = job.choices
        begun = False
        try:
            async for piece in choice.pieces():
                if not begun:  # only now it is known what the cache had
                    yield typed_event({"type": "message_start", "message": self._message(choice)})
                    begun = True
                if steps := b"".join(map(typed_event, self._blocks.add(piece.events))):
                    yield steps
        except ApiError as error:
            yield typed_event(error.body("/v1/messages"))
            return
        usage, delta = self._usage(choice), self._end(choice, piece)
        yield typed_event({"type": "message_delta", "delta": delta, "usage": usage})
        yield typed_event({"type": "message_stop"})

    def _message(self, choice: Choice) -> Json:
        head = {"id": self.id, "type": "message", "role": "assistant", "model": self._model}
        ends = {"stop_reason": None, "stop_sequence": None}
        return {**head, "content": [], **ends, "usage": self._usage(choice)}

    def _usage(self, choice: Choice) -> Json:
        return {
            "input_tokens": len(choice.prompt) - choice.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": choice.cached_tokens,
            "output_tokens": choice.num_tokens,
        }

    def _end(self, choice: Choice, piece: Piece) -> Json:
        called = any(isinstance(found, Finished) and found.called for found in piece.events)
        end = finish(piece, called)
        reason, stop = _STOPS[end["finish_reason"]], end["stop_reason"]
        if reason == "max_tokens" and choice.num_tokens < self._most:
            reason = "model_context_window_exceeded"
        if reason == "end_turn" and isinstance(stop, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": stop}
        return {"stop_reason": reason, "stop_sequence": None}


class _Block:
    """A content block that grows."""

    def __init__(self, signature: str, index: int, begun: Begun) -> None:
        self._place, self._signature = index, {"signature": signature}
        match begun:
            case ReasoningDelta():
                self.content: Json = {"type": "thinking", "thinking": "", "signature": ""}
            case ContentDelta():
                self.content = {"type": "text", "text": ""}
            case ToolCallBegin(_, call_id, name):
                self.content = {"type": "tool_use", "id": call_id, "name": name, "input": {}}

    def begin(self) -> Iterator[Json]:
        yield self._event("start", content_block=self.content)

    def delta(self, text: str) -> Json:
        kind, field = _DELTAS[self.content["type"]]
        return self._event("delta", delta={"type": kind, field: text})

    def end(self, complete: bool) -> Iterator[Json]:
        if "signature" in self.content:  # clients leave out what they send back without one
            yield self._event("delta", delta={"type": "signature_delta", **self._signature})
        yield self._event("stop")

    def _event(self, what: str, **content: Json) -> Json:
        return {"type": f"content_block_{what}", "index": self._place, **content}
