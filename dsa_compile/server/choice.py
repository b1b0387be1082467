"""One answer on its way from the engine to the client: tokens become text, stop strings end it."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any

from dsa_compile.chat import Event, StreamParser
from dsa_compile.runtime.requests.detokenizer import Tokenizer
from dsa_compile.runtime.requests.logprobs import TokenLogprobs
from dsa_compile.runtime.requests.outputs import Completion, FinishReason
from dsa_compile.runtime.requests.sampling_params import SamplingParams
from dsa_compile.server.engine_client import EngineClient
from dsa_compile.server.errors import ApiError
from dsa_compile.server.request_record import RequestRecord


@dataclass(slots=True)
class Piece:
    """Piece of an answer that is new.

    Attributes:
        text: that is certain by now; never part of a stop string that is cut later.
        token_ids: that came; their text may come with a later piece.
        logprobs: one entry a token where the request wants them.
        finish_reason: in the last piece.
        events: that the answer's parser found, if it has one.
        stop_reason: the stop string or stop token that ended the answer, in the last piece.
    """

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    finish_reason: FinishReason | None
    events: list[Event]
    stop_reason: str | int | None = None


def finish(piece: Piece | None, called: bool = False) -> dict[str, Any]:
    """The end of a choice as the API tells it, with vLLM's ``stop_reason``.

    Args:
        piece: the last one so far, if there is one.
        called: whether the answer is a call.
    """
    if piece is None or piece.finish_reason is None:
        return {"finish_reason": None}
    reason = "tool_calls" if piece.finish_reason == "stop" and called else piece.finish_reason
    return {"finish_reason": reason, "stop_reason": piece.stop_reason}


class Choice:
    """One engine request; queued when it is made.

    Args:
        engine: serves it.
        record: notes its tokens and its end.
        request_id: of the engine's request.
        index: of the choice in the answer.
        prompt: token ids.
        params: with stop strings.
        tokenizer: None leaves the text empty.
        priority: of the engine's request.
        cache_salt: likewise.
        timeout: seconds after which it ends with an error; None for never.
        scores: whether only log-probabilities of the prompt are wanted; the token that the engine
            generates is left out then.
        parser: of the answer to a chat.

    Attributes:
        prompt_logprobs: one entry a prompt token but the first, where the request wants them; there
            with the first piece.
    """

    def __init__(
        self,
        engine: EngineClient,
        record: RequestRecord,
        request_id: str,
        index: int,
        prompt: Sequence[int],
        params: SamplingParams,
        tokenizer: Tokenizer | None,
        priority: int,
        cache_salt: str | None = None,
        timeout: float | None = None,
        scores: bool = False,
        parser: StreamParser | None = None,
    ) -> None:
        self.index = index
        self.prompt = prompt
        self.prompt_logprobs: list[TokenLogprobs] = []
        self._scores = scores
        self._engine = engine
        self._record = record
        self._completion = Completion(params, engine.eos_token_ids, tokenizer, parser)
        self._shown = 0
        self._finished = False
        self._stream = engine.add(request_id, prompt, params, priority, cache_salt)
        self._timer: asyncio.TimerHandle | None = None
        if timeout is not None:
            problem = f"the request took longer than {timeout:g} s"
            error = ApiError(408, problem, code="request_timeout", param="timeout")
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(timeout, self._stream.fail, error)

    @property
    def num_tokens(self) -> int:
        """Tokens generated so far."""
        return self._record.num_tokens

    @property
    def reasoning_tokens(self) -> int:
        """Number of :attr:`num_tokens` that are reasoning, as far as a parser says so."""
        return self._completion.reasoning_tokens

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt whose cache rows were reused."""
        return self._record.cached_tokens

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """Pieces of the answer as they come, until it ends.

        Raises:
            ApiError: the engine failed, or this request did.
        """
        while not self._finished:
            yield await self._next()

    def close(self) -> None:
        """Abort what is unfinished."""
        if not self._finished:
            self._finish("abort")

    async def _next(self) -> Piece:
        delta = await self._stream.take()
        completion = self._completion
        if not self.num_tokens:
            self.prompt_logprobs += delta.prompt_logprobs
        kept = 0
        for token in delta.token_ids:
            kept += 1
            if completion.append(token) is not None:
                break
        reason = completion.finish_reason
        tokens, logprobs = delta.token_ids, delta.logprobs
        if kept < len(tokens):
            tokens, logprobs = tokens[:kept], logprobs[:kept]
        if self._scores:
            tokens, logprobs, reason = [], [], reason and "length"
        self._record.tokens(len(tokens), delta.cached_tokens, delta.scheduled_at)
        if reason is None and delta.finish_reason is not None:
            reason = delta.finish_reason
            completion.finish(reason)
        if reason is not None:
            self._finish(reason)
        if reason in ("error", "abort"):
            raise ApiError(500, delta.error or "the request was aborted", code="request_failed")
        pieces = completion.pieces or []
        text = "" if self._scores else "".join(pieces[self._shown :])
        self._shown = len(pieces)
        stop = completion.stop_reason if reason == "stop" else None
        return Piece(text, tokens, logprobs, reason, completion.events(), stop)

    def _finish(self, reason: str) -> None:
        self._finished = True
        if self._timer is not None:
            self._timer.cancel()
        self._engine.abort(self._stream.request_id)  # does nothing if the engine has ended it
        self._record.end(reason)
