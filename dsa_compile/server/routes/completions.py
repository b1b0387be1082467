"""``POST /v1/completions``."""

import time
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from dsa_compile.runtime.requests.grammar import Grammar
from dsa_compile.runtime.requests.sampling_params import SamplingParams
from dsa_compile.server.choice import Choice, Piece, finish
from dsa_compile.server.errors import bad_request, unsupported
from dsa_compile.server.openai_types import CompletionRequest
from dsa_compile.server.sampling import sampling_params
from dsa_compile.server.service import Job, Service, new_id
from dsa_compile.server.streaming import DONE, event, merged
from dsa_compile.server.token_text import CompletionLogprobs, prompt_logprobs
from dsa_compile.server.usage import chunk_usage, usage


def completions_router(service: Service) -> APIRouter:
    """The route."""
    router = APIRouter()

    @router.post("/v1/completions")
    async def create_completion(body: CompletionRequest, request: Request) -> Response:
        """Continue prompts, texts or token ids."""
        service.check_common(body)
        _refuse(service, body)
        given = _prompts(body.prompt)
        service.check_count(body, len(given) * (body.n or 1))
        prompts = [
            await service.encode(prompt, "prompt", special=body.add_special_tokens)
            for prompt in given
        ]
        grammar = await service.grammar(request, body, body.response_format)
        params = [_params(service, body, prompt, grammar) for prompt in prompts]
        answer = _Answer(service, body, prompts)
        tokenizer, scores = service.text.tokenizer, body.max_tokens == 0
        job = service.start(answer.id, prompts, params, body, tokenizer, scores)
        return await job.respond(request, answer, body.stream)

    return router


def _refuse(service: Service, body: CompletionRequest) -> None:
    if body.suffix:
        raise unsupported("suffix", "the model continues text, it does not fill gaps")
    if body.best_of not in (None, body.n or 1):
        raise unsupported("best_of", "use n, and choose")
    if body.logprobs is not None:
        service.check_logprobs(body.logprobs, "logprobs")


def _prompts(prompt: Any) -> list[Any]:
    """One entry a prompt; a list of integers is one prompt."""
    if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
        return [prompt]
    if not prompt:
        raise bad_request("prompt is empty", "prompt")
    return list(prompt)


def _params(
    service: Service, body: CompletionRequest, prompt: list[int], grammar: Grammar | None
) -> SamplingParams:
    most = body.max_tokens if body.max_tokens is not None else service.room(prompt)
    wanted = [body.prompt_logprobs, body.logprobs if body.echo else None]
    return sampling_params(
        body,
        service.defaults,
        max_tokens=most or 1,  # the logits of a prompt come with those of its next token
        logprobs=body.logprobs,
        prompt_logprobs=max((count for count in wanted if count is not None), default=None),
        grammar=grammar,
    )


class _Answer:
    """The choices of a request in the form of the API."""

    def __init__(self, service: Service, body: CompletionRequest, prompts: list[list[int]]) -> None:
        self.id = new_id("cmpl")
        self._service = service
        self._body = body
        self._prompts = prompts
        self._created = int(time.time())
        self._echoed = [self._echo(prompt) for prompt in prompts]
        # Without a tokenizer token ids are all that an answer has.
        self._shows_ids = body.return_token_ids or service.text.tokenizer is None

    async def whole(self, job: Job) -> dict[str, Any]:
        texts: list[list[str]] = [[self._prefix(choice.index)] for choice in job.choices]
        last: list[Piece | None] = [None] * len(job.choices)
        logprobs: list[list[Any]] = [[] for _ in job.choices]
        ids: list[list[int]] = [[] for _ in job.choices]
        async for choice, piece in merged(job.choices):
            texts[choice.index].append(piece.text)
            ids[choice.index] += piece.token_ids
            logprobs[choice.index] += piece.logprobs
            last[choice.index] = piece
        choices = []
        for choice, parts, end in zip(job.choices, texts, last, strict=True):
            entries, described = self._logprobs(choice.index), None
            if entries is not None:
                described = entries.add(logprobs[choice.index])
                if self._body.echo:
                    of_prompt = self._of_prompt(choice, entries)
                    described = {
                        key: each and each + described[key] for key, each in of_prompt.items()
                    }
            choices.append(_choice(choice.index, "".join(parts), described, end))
            if self._body.prompt_logprobs is not None:
                tokenizer = self._service.text.tokenizer
                choices[-1]["prompt_logprobs"] = prompt_logprobs(tokenizer, choice.prompt_logprobs)
            if self._shows_ids:
                generated = ids[choice.index]
                choices[-1] |= {"prompt_token_ids": choice.prompt, "token_ids": generated}
        return {**self._head(), "choices": choices, "usage": usage(self._prompts, job.choices)}

    async def events(self, job: Job) -> AsyncGenerator[bytes, None]:
        head = self._head()
        options = self._body.stream_options
        logprobs = [self._logprobs(choice.index) for choice in job.choices]
        unsent = {choice.index for choice in job.choices}  # token ids of their prompts
        waiting = set(unsent) if self._body.echo else set()
        if self._body.logprobs is None:
            for choice in job.choices if waiting else ():
                first = _choice(choice.index, self._prefix(choice.index), None, None)
                yield event({**head, **chunk_usage(options, choice), "choices": [first]})
            waiting.clear()
        async for choice, piece in merged(job.choices):
            entries, counts = logprobs[choice.index], chunk_usage(options, choice)
            if entries is not None and choice.index in waiting:  # the prompt's are there now
                waiting.remove(choice.index)
                prefix, described = self._prefix(choice.index), self._of_prompt(choice, entries)
                chunk = _choice(choice.index, prefix, described, None)
                yield event({**head, **counts, "choices": [chunk]})
            ids = piece.token_ids if self._shows_ids else []
            if not (piece.text or piece.logprobs or piece.finish_reason or ids):
                continue
            chunk = _chunk(choice.index, piece, entries)
            if self._shows_ids:
                chunk["token_ids"] = ids
                if choice.index in unsent:
                    unsent.remove(choice.index)
                    chunk["prompt_token_ids"] = choice.prompt
            yield event({**head, **counts, "choices": [chunk]})
        if options is not None and options.include_usage:
            yield event({**head, "choices": [], "usage": usage(self._prompts, job.choices)})
        yield DONE

    def _head(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self._created,
            "model": self._service.model,
        }

    def _of_prompt(self, choice: Choice, entries: CompletionLogprobs) -> dict[str, Any]:
        skip = self._body.skip_special_tokens
        return entries.of_prompt(choice.prompt, choice.prompt_logprobs, skip)

    def _prefix(self, index: int) -> str:
        return self._echoed[index // (self._body.n or 1)]

    def _echo(self, prompt: list[int]) -> str:
        tokenizer = self._service.text.tokenizer
        if not self._body.echo or tokenizer is None:
            return ""
        text: str = tokenizer.decode(prompt, skip_special_tokens=self._body.skip_special_tokens)
        return text

    def _logprobs(self, index: int) -> CompletionLogprobs | None:
        top = self._body.logprobs
        if top is None:
            return None
        return CompletionLogprobs(self._service.text.tokenizer, top, len(self._prefix(index)))


def _chunk(index: int, piece: Piece, logprobs: CompletionLogprobs | None) -> dict[str, Any]:
    described = None if logprobs is None else logprobs.add(piece.logprobs)
    return _choice(index, piece.text, described, piece)


def _choice(index: int, text: str, logprobs: Any, end: Piece | None) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": index, "text": text, "logprobs": logprobs}
    return choice | finish(end)
