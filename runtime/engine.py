"""From prompts to tokens: schedule, run, sample, again."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from dsa_compile.errors import RequestError, UserError
from dsa_compile.runtime.batch import build_batch
from dsa_compile.runtime.limits import SchedulerConfig
from dsa_compile.runtime.logprobs import TokenLogprobs
from dsa_compile.runtime.outputs import Completion, RequestOutput
from dsa_compile.runtime.prompts import Prompt, load_tokenizer, token_ids_of
from dsa_compile.runtime.request import Request, Status
from dsa_compile.runtime.runner import Runner
from dsa_compile.runtime.sampler import SampledToken, Sampler, SamplingState
from dsa_compile.runtime.sampling_params import SamplingParams
from dsa_compile.runtime.scheduler import Failure, Scheduler, SchedulerStats
from dsa_compile.runtime.step import ScheduledStep


@dataclass(frozen=True)
class EngineConfig:
    """How an engine batches.

    Args:
        max_batched_tokens: most tokens one step computes; longer prompts are computed in chunks.
        max_running: most requests one step can hold.
        max_model_len: most tokens, prompt and generated, of one request; None for the model's own
            limit.
        enable_prefix_cache: reuse the cache rows of earlier requests with the same prefix.
    """

    max_batched_tokens: int = 2048
    max_running: int = 256
    max_model_len: int | None = None
    enable_prefix_cache: bool = True


@dataclass(slots=True, eq=False)
class _Generation:
    """What the engine keeps of a request beside its place in the schedule."""

    prompt_ids: list[int]
    sampling: SamplingState
    completion: Completion
    logprobs: list[TokenLogprobs] | None
    token_ids: list[int] = field(default_factory=list)


class Engine:
    """Generates tokens for many requests at once; not thread-safe.

    Use :meth:`generate`, or :meth:`add_request` and :meth:`step` until :meth:`has_unfinished` is
    false.

    Args:
        runner: the model and its caches.
        config: how to batch.
        tokenizer: encodes text prompts and decodes outputs (``encode(text).ids``,
            ``decode(ids, skip_special_tokens=...)``, as ``tokenizers.Tokenizer``); None works in
            token ids alone.

    ``scheduler`` is open for those who move cache pages: a lost page is reported to it.

    Raises:
        UserError: a limit below 1, or ``max_model_len`` above the model's.
    """

    def __init__(
        self, runner: Runner, config: EngineConfig | None = None, tokenizer: Any = None
    ) -> None:
        config = config or EngineConfig()
        max_model_len = config.max_model_len
        if max_model_len is None:
            max_model_len = runner.max_model_len
        elif max_model_len > runner.max_model_len:
            raise UserError(
                f"max_model_len={max_model_len} exceeds the model's limit of "
                f"{runner.max_model_len} tokens"
            )
        self._runner = runner
        self._tokenizer = tokenizer
        self._sampler = Sampler(runner.vocab_size)
        self.scheduler = Scheduler(
            SchedulerConfig(
                num_blocks=runner.num_blocks,
                block_size=runner.block_size,
                max_batched_tokens=config.max_batched_tokens,
                max_running=config.max_running,
                max_model_len=max_model_len,
                enable_prefix_cache=config.enable_prefix_cache,
            )
        )
        self._live: dict[Request, _Generation] = {}
        self._generate_calls = 0

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        num_blocks: int | None = None,
        max_batched_tokens: int = EngineConfig.max_batched_tokens,
        max_running: int = EngineConfig.max_running,
        max_model_len: int | None = None,
        enable_prefix_cache: bool = True,
        verify: str = "full",
        model_dir: str | Path | None = None,
    ) -> "Engine":
        """Load an artifact.

        Args:
            path: the artifact's directory.
            num_blocks: blocks of each cache; None lets the loader choose.
            max_batched_tokens: see :class:`EngineConfig`; the other limits too.
            max_running: see :class:`EngineConfig`.
            max_model_len: see :class:`EngineConfig`.
            enable_prefix_cache: see :class:`EngineConfig`.
            verify: check the weight files' contents ("full") or their headers ("header").
            model_dir: where the referenced weights are now, if not where they were compiled from.

        Raises:
            ArtifactError: the artifact or its weights are absent, edited or of another version.
            UserError: as the constructor.
        """
        # Here, so that an engine over another runner loads nothing of the artifact's reader.
        from dsa_compile.runtime.loading import load_runner

        moved = None if model_dir is None else Path(model_dir)
        runner = load_runner(path, num_blocks=num_blocks, verify=verify, model_dir=moved)
        config = EngineConfig(max_batched_tokens, max_running, max_model_len, enable_prefix_cache)
        return cls(runner, config, load_tokenizer(Path(path)))

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Generate for every prompt and return the finished outputs in the prompts' order.

        Args:
            prompts: token ids, or texts if the engine has a tokenizer.
            params: one for all, or one a prompt.

        Raises:
            RequestError: a prompt or its parameters cannot be served (nothing is run), or requests
                added with :meth:`add_request` are unfinished.
        """
        if isinstance(prompts, str) or not isinstance(prompts, Sequence):
            raise RequestError("prompts must be a list of prompts, each a text or a list of ids")
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompts)
        if len(params) != len(prompts):
            raise RequestError(f"{len(prompts)} prompts but {len(params)} sampling parameters")
        if self.has_unfinished():
            raise RequestError("generate() needs an idle engine; finish or abort its requests")
        self._generate_calls += 1
        ids = [f"generate-{self._generate_calls}-{index}" for index in range(len(prompts))]
        outputs: dict[str, RequestOutput] = {}
        try:
            for request_id, prompt, chosen in zip(ids, prompts, params, strict=True):
                self.add_request(request_id, prompt, chosen)
            while self.has_unfinished():
                # Outputs of unfinished requests are copies nobody would see.
                for request in self._advance():
                    if request.status is Status.FINISHED:
                        outputs[request.request_id] = self._output(request)
        finally:
            for request_id in ids:
                self.abort(request_id)
        return [outputs[request_id] for request_id in ids]

    def add_request(
        self, request_id: str, prompt: Prompt, params: SamplingParams, priority: int = 0
    ) -> None:
        """Queue a request; lower ``priority`` runs first, equal ones in order of arrival.

        Raises:
            RequestError: the id is taken or not a string; the prompt is empty, holds an id outside
                the vocabulary, or is text without a tokenizer; the request can never fit.
        """
        if not isinstance(request_id, str):
            raise RequestError(f"request id {request_id!r} must be a string")
        if not isinstance(params, SamplingParams):
            raise RequestError(f"request {request_id!r}: params must be SamplingParams")
        if type(priority) is not int:
            raise RequestError(f"request {request_id!r}: priority {priority!r} must be an integer")
        prompt_ids = token_ids_of(request_id, prompt, self._runner.vocab_size, self._tokenizer)
        # Before anything is sized by max_tokens, which may be huge.
        self.scheduler.check_admissible(request_id, len(prompt_ids), params.max_tokens)
        eos_ids = self._runner.eos_token_ids
        generation = _Generation(
            prompt_ids,
            SamplingState(params, prompt_ids, eos_ids, self._runner.vocab_size),
            Completion(params, eos_ids, self._tokenizer),
            None if params.logprobs is None else [],
        )
        request = Request(
            request_id, prompt_ids, params.max_tokens, generation.completion, priority
        )
        self.scheduler.add(request)
        self._live[request] = generation

    def step(self) -> list[RequestOutput]:
        """Run one step; the requests that got a token or finished, with all they have so far.

        If the model raises, the step is undone and the exception passes on: its requests are still
        there, to be tried again or aborted.
        """
        return [self._output(request) for request in self._advance()]

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request now and return what it has, or None if it is unknown or finished."""
        request = self.scheduler.abort(request_id)
        return None if request is None else self._output(request)

    def has_unfinished(self) -> bool:
        """Whether any request waits or runs."""
        return self.scheduler.has_unfinished()

    def stats(self) -> SchedulerStats:
        """Requests, blocks, preemptions and prefix hits."""
        return self.scheduler.stats()

    def _advance(self) -> list[Request]:
        """Run one step; the requests that got a token or failed."""
        step = self.scheduler.schedule()
        if not step.entries:
            return []
        try:
            logits = self._runner.execute(build_batch(step))
            sampled = self._sample(step, logits)
        except BaseException:
            self.scheduler.discard(step)
            raise
        return self.scheduler.commit(step, self._keep(sampled))

    def _sample(self, step: ScheduledStep, logits: torch.Tensor) -> dict[Request, SampledToken]:
        requests = [entry.request for entry in step.entries if entry.samples]
        # A request aborted while the step ran has a row of logits but nobody to sample it for.
        rows = [i for i, r in enumerate(requests) if r.status is not Status.FINISHED]
        if len(rows) < len(requests):
            logits, requests = logits[rows], [requests[i] for i in rows]
        states = [self._live[request].sampling for request in requests]
        return dict(zip(requests, self._sampler.sample(logits, states), strict=True))

    def _keep(self, sampled: dict[Request, SampledToken]) -> dict[str, int | Failure]:
        """Note the sampled tokens with their generations; the results to commit."""
        results: dict[str, int | Failure] = {}
        for request, choice in sampled.items():
            request_id = request.request_id
            if choice.failed is not None:
                results[request_id] = Failure(f"request {request_id!r}: {choice.failed}")
                continue
            generation = self._live[request]
            generation.token_ids.append(choice.token_id)
            generation.sampling.append(choice.token_id)
            if generation.logprobs is not None and choice.logprob is not None:
                generation.logprobs.append(choice.logprob)
            results[request_id] = choice.token_id
        return results

    def _output(self, request: Request) -> RequestOutput:
        """What ``request`` has so far; forgets it if it is finished."""
        generation = self._live[request]
        if request.finish_reason is not None:
            del self._live[request]
            if generation.completion.finish_reason is None:  # not ended by its tokens
                generation.completion.finish(request.finish_reason)
        return RequestOutput(
            request_id=request.request_id,
            prompt_token_ids=generation.prompt_ids,
            token_ids=list(generation.token_ids),
            text=generation.completion.text,
            finish_reason=request.finish_reason,
            logprobs=None if generation.logprobs is None else list(generation.logprobs),
            error=request.error,
            cached_tokens=request.cached_tokens,
        )
