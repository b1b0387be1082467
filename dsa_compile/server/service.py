"""Service that the routes share: the artifact's text side, the engine, admission and metrics."""

import secrets
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from dsa_compile.chat import StreamParser
from dsa_compile.errors import RequestError
from dsa_compile.runtime.requests.detokenizer import Tokenizer
from dsa_compile.runtime.requests.grammar import Grammar
from dsa_compile.runtime.requests.prompts import require_options, token_ids_of
from dsa_compile.runtime.requests.sampling_params import SamplingParams
from dsa_compile.server.admission import Admission
from dsa_compile.server.artifact_text import ArtifactText
from dsa_compile.server.choice import Choice
from dsa_compile.server.engine_client import EngineClient
from dsa_compile.server.errors import ApiError, bad_request, from_request_error, unsupported
from dsa_compile.server.metrics import Metrics
from dsa_compile.server.openai_types import SamplingFields
from dsa_compile.server.prompt_encoding import (
    LEAST_BOUND,
    encoder,
    in_thread,
    require_fits,
    require_text_fits,
)
from dsa_compile.server.request_record import RequestRecord
from dsa_compile.server.settings import Settings
from dsa_compile.server.streaming import EventStream, JsonResponse, unless_gone
from dsa_compile.server.structured import grammar_of
from dsa_compile.server.supervisor import Supervisor
from dsa_compile.server.tracing import Tracing

_MOST_LISTED = 1 << 18  # tokens in lists of parameters, of all answers of a request together

_MOST_SCORES = 1 << 22  # log-probabilities of prompts, of a request; some 100 bytes each


class Job:
    """The choices of one HTTP request; :meth:`close` must be called when it is over."""

    def __init__(self, choices: Sequence[Choice], places: ExitStack) -> None:
        self.choices = choices
        self._places = places

    def close(self) -> None:
        """Abort what is unfinished and give the places back."""
        for choice in self.choices:
            choice.close()
        self._places.close()

    async def respond(
        self,
        request: Request,
        answer: "Answer",
        stream: bool | None,
        headers: Mapping[str, str] | None = None,
    ) -> Response:
        """The response of an HTTP request, after which the job is closed.

        Args:
            request: of the client, who may leave meanwhile.
            answer: the choices in the form of an API.
            stream: whether it is sent as it grows.
            headers: of the response.
        """
        if stream:
            return EventStream(answer.events(self), self.close, headers)
        try:
            return JsonResponse(await unless_gone(request, answer.whole(self)), headers=headers)
        finally:
            self.close()


class Answer(Protocol):
    """The choices of a job in the form of one API."""

    async def whole(self, job: Job) -> dict[str, Any]:
        """The JSON of the response."""
        ...

    def events(self, job: Job) -> AsyncGenerator[bytes, None]:
        """The same as server-sent events."""
        ...


@dataclass
class Service:
    """One served artifact."""

    settings: Settings
    text: ArtifactText
    supervisor: Supervisor
    admission: Admission
    metrics: Metrics
    tracing: Tracing | None = None

    def __post_init__(self) -> None:
        self.model = self.settings.model_names[0]
        self.defaults = self.text.defaults.params

    @property
    def engine(self) -> EngineClient:
        """The running engine; 503 if there is none."""
        return self.supervisor.engine

    def check_model(self, name: str | None) -> None:
        """Refuse the name of another model (404)."""
        if name is not None and name not in self.settings.model_names:
            known = ", ".join(self.settings.model_names)
            message = f"the model {name!r:.200} does not exist; this server has {known}"
            raise ApiError(404, message, param="model", code="model_not_found")

    def check_common(self, body: SamplingFields) -> None:
        """Refuse fields that do not fit together, or that are not acted on."""
        self.check_model(body.model)
        if body.stream_options is not None and not body.stream:
            raise bad_request("stream_options needs stream=true", "stream_options")
        if body.prompt_logprobs is not None:
            self.check_logprobs(body.prompt_logprobs, "prompt_logprobs")
            if body.stream:
                raise unsupported("prompt_logprobs", "streams have echo and logprobs instead")
        if body.store:
            raise unsupported("store", "answers are not kept")

    def check_logprobs(self, count: int, param: str) -> None:
        """Refuse more alternatives than the server reports."""
        most = self.settings.max_logprobs
        if not 0 <= count <= most:
            raise bad_request(f"{param} must be in [0, {most}]; got {count}", param)

    def check_count(self, body: SamplingFields, count: int) -> None:
        """Refuse more answers in one request than the server gives, or too many tokens listed for
        them: each answer has parameters of its own, in both processes."""
        most = self.settings.max_choices
        if count > most:
            raise bad_request(f"{count} answers in one request; at most {most}", "n")
        for param in ("logit_bias", "stop_token_ids"):
            listed = len(getattr(body, param) or ())
            if listed and listed > (most := min(self.engine.vocab_size, _MOST_LISTED // count)):
                problem = f"{listed} tokens for each of {count} answers; at most {most}"
                raise bad_request(f"{param}: {problem}", param)

    def check_one(self, body: SamplingFields) -> None:
        """Refuse what an API of one answer has no place for."""
        if body.n not in (None, 1):
            raise unsupported("n", "a response is one answer")
        if body.prompt_logprobs is not None:
            raise unsupported("prompt_logprobs", "use /v1/completions")
        self.check_count(body, 1)

    @property
    def longest(self) -> int:
        """Tokens of a prompt and its answer at most."""
        limits = self.engine.limits
        return min(limits.max_model_len, limits.capacity)

    async def encode(
        self, prompt: str | Sequence[int], param: str, *, special: bool = True
    ) -> list[int]:
        """Token ids of a prompt.

        Args:
            prompt: a text or token ids.
            param: the field that has it.
            special: add the tokens that the tokenizer puts around a text.

        Raises:
            ApiError: it cannot be served, or is far longer than what can (400).
        """
        most = max(self.longest, LEAST_BOUND)
        if not isinstance(prompt, str):
            require_fits(len(prompt), most, param)
        return await in_thread(len(prompt), self._encode, prompt, param, special, most)

    def _encode(
        self, prompt: str | Sequence[int], param: str, special: bool, most: int
    ) -> list[int]:
        tokenizer = self.text.tokenizer
        if tokenizer is not None and isinstance(prompt, str):
            require_text_fits(tokenizer, prompt, most, param)
        try:
            given = encoder(tokenizer, special)
            return token_ids_of("prompt", prompt, self.engine.vocab_size, given)
        except RequestError as error:
            raise from_request_error(error, "prompt") from None

    async def grammar(
        self,
        request: Request,
        body: SamplingFields,
        response_format: dict[str, Any] | None,
        after: str = "",
        forced: Grammar | None = None,
    ) -> Grammar | None:
        """The grammar of a request, compiled by the engine; None if it asks for none.

        Args:
            request: of the client, who may leave meanwhile.
            body: of the request.
            response_format: of the request.
            after: see :class:`Grammar`.
            forced: of the calls that ``tool_choice`` requires.

        Raises:
            ApiError: it is malformed, too large or cannot be compiled (400).
            ClientGoneError: the client left.
        """
        grammar, param = grammar_of(body, response_format, after, forced)
        if grammar is not None:
            work = self.engine.compile_grammar(new_id("grammar"), grammar, param)
            await unless_gone(request, work)
        return grammar

    def room(self, prompt: Sequence[int]) -> int:
        """Tokens that may be generated after a prompt at most; at least 1."""
        return max(1, self.longest - len(prompt))

    def start(
        self,
        request_id: str,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        body: SamplingFields,
        tokenizer: Tokenizer | None,
        scores: bool = False,
        parser: Callable[[], StreamParser | None] = lambda: None,
    ) -> Job:
        """Queue ``n`` answers to each prompt, the answers of the first prompt first.

        Args:
            request_id: of the HTTP request; choices number it.
            prompts: token ids.
            params: one a prompt.
            body: has ``n``, ``priority``, ``cache_salt`` and ``timeout``.
            tokenizer: makes the texts; None for a model without one.
            scores: see :class:`Choice`.
            parser: makes the parser of each answer.

        Raises:
            ApiError: a prompt does not fit (400), the queue is full (429), or there is no engine
                (503).
        """
        engine, n = self.engine, body.n or 1
        count = n * len(prompts)
        if not 0 <= body.priority < 1 << 31:
            raise bad_request(f"priority must be in [0, 2**31); got {body.priority}", "priority")
        try:
            require_options(request_id, body.priority, body.cache_salt)
        except RequestError as error:
            raise from_request_error(error, "cache_salt") from None
        timeout = self.settings.request_timeout if body.timeout is None else body.timeout
        for prompt, chosen in zip(prompts, params, strict=True):
            self._check_fits(body, len(prompt), chosen.max_tokens)
            self._check_token_ids(chosen)
        _check_scores(n, prompts, params)
        if tokenizer is None and any(chosen.stop_strings for chosen in params):
            raise bad_request("stop needs a tokenizer, and the model has none", "stop")
        places = ExitStack()
        places.enter_context(self.admission.admit(count, n * sum(map(len, prompts)), engine.limits))
        job = Job([], places)
        choices: list[Choice] = []
        job.choices = choices
        try:
            for prompt, chosen in zip(prompts, params, strict=True):
                for copy in range(n):
                    index = len(choices)
                    own = f"{request_id}-{index}"
                    choices.append(
                        Choice(
                            engine,
                            RequestRecord(self.metrics, self.tracing, own, len(prompt), chosen),
                            own,
                            index,
                            prompt,
                            _of_copy(chosen, copy),
                            tokenizer,
                            body.priority,
                            body.cache_salt,
                            timeout,
                            scores,
                            parser(),
                        )
                    )
        except BaseException:
            job.close()
            raise
        return job

    def _check_fits(self, body: SamplingFields, prompt_len: int, max_tokens: int) -> None:
        limits = self.engine.limits
        try:
            limits.check_fits("", prompt_len, max_tokens)
        except RequestError as error:
            most = self.longest
            fields = type(body).model_fields
            given = next(name for name in ("prompt", "messages", "input") if name in fields)
            # clients look for these words, or for the code
            raise ApiError(
                400,
                f"This model's maximum context length is {most} tokens: "
                + str(error).removeprefix("request '': "),
                param=given if prompt_len >= most else "max_tokens",
                code="context_length_exceeded",
            ) from None

    def _check_token_ids(self, params: SamplingParams) -> None:
        size = self.engine.vocab_size
        for param, ids in (
            ("stop_token_ids", params.stop_token_ids),
            ("logit_bias", params.logit_bias or ()),
        ):
            if any(token >= size for token in ids):
                raise bad_request(f"{param}: the model's token ids are below {size}", param)


def _check_scores(
    n: int, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
) -> None:
    wanted = n * sum(
        len(prompt) * (chosen.prompt_logprobs + 1)
        for prompt, chosen in zip(prompts, params, strict=True)
        if chosen.prompt_logprobs is not None
    )
    if wanted > _MOST_SCORES:
        problem = f"{wanted} log-probabilities of prompts; at most {_MOST_SCORES} in one request"
        raise bad_request(problem, "prompt_logprobs")


def _of_copy(params: SamplingParams, copy: int) -> SamplingParams:
    """Parameters of the ``copy``-th answer to a prompt: equal seeds would give equal answers."""
    if not copy or params.seed is None:
        return params
    seed = params.seed + copy
    return replace(params, seed=seed if seed < 1 << 63 else seed - (1 << 64))


def new_id(prefix: str) -> str:
    """An id for an answer."""
    return f"{prefix}-{secrets.token_hex(12)}"
