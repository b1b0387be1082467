"""The engine that a server drives: requests in, one step at a time, outputs."""

import gc
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NoReturn

import torch

from dsa_compile.artifact.acceptance import AcceptanceRecord
from dsa_compile.chat import ChatFormat, StreamParser
from dsa_compile.errors import RequestError, UserError
from dsa_compile.kernels.late_kernels import late_kernels
from dsa_compile.runtime.acceptance_watch import AcceptanceWatch
from dsa_compile.runtime.engine_options import EngineOptions
from dsa_compile.runtime.execution.expert_counts import ExpertCounts
from dsa_compile.runtime.execution.runner import Runner, Watched
from dsa_compile.runtime.failures.interrupts import Uninterrupted
from dsa_compile.runtime.failures.step_errors import StepError
from dsa_compile.runtime.generation import Generation
from dsa_compile.runtime.requests.chat_prompt import ChatPrompt
from dsa_compile.runtime.requests.generation_config import GenerationConfig
from dsa_compile.runtime.requests.grammar import Grammar
from dsa_compile.runtime.requests.logprobs import TokenLogprobs
from dsa_compile.runtime.requests.outputs import Completion, RequestOutput, Transcript
from dsa_compile.runtime.requests.prompts import (
    Prompt,
    require_options,
    require_request_id,
    token_ids_of,
)
from dsa_compile.runtime.requests.sampling_params import SamplingParams
from dsa_compile.runtime.runner_limits import overlaps, scheduler_config
from dsa_compile.runtime.sampling.grammar import GrammarCompiler, GrammarState
from dsa_compile.runtime.sampling.sampler import SamplingState
from dsa_compile.runtime.scheduling.lanes import AnyScheduler, LaneScheduler
from dsa_compile.runtime.scheduling.request import Request
from dsa_compile.runtime.scheduling.scheduler import Scheduler
from dsa_compile.runtime.scheduling.stats import SchedulerStats
from dsa_compile.runtime.step_pipeline import StepPipeline

# Attributes of an engine that are gone once it is closed, and their memory with them.
_FREED = ("_runner", "_pipeline", "scheduler")


class StepEngine:
    """Runs the steps of many requests at once; not thread-safe.

    Args:
        runner: the model and its caches.
        options: how to batch; the options of loading are not used.
        tokenizer: encodes text prompts and decodes outputs (``encode(text).ids``,
            ``decode(ids, skip_special_tokens=...)``, as ``tokenizers.Tokenizer``); None works in
            token ids alone.
        generation_config: the model's; its end tokens are added to the runner's.
        chat_format: gives the model's chat format when one is needed first.
        vocabulary: gives the tokenizer whose tokens grammars are made of, when one is needed first;
            None for ``tokenizer``.
        acceptance: of the artifact's drafts when it was evaluated, to warn where fewer are right.
        expert_counts: of the runner's routed experts, for :meth:`stats`.
        name: of the model, for ``repr``; None for the runner's class.

    Attributes:
        options: that the engine was made with.
        tokenizer: a ``tokenizers.Tokenizer`` if it was loaded with an artifact; or None.
        vocab_size: number of token ids of the model, which start at 0.
        eos_token_ids: end tokens that ``config.json`` and ``generation_config.json`` name, or the
            tokenizer where neither does.
        scheduler: for those who move cache pages. A lost page is reported to it, after
            :meth:`drain`.
        closed: whether :meth:`close` was called.

    Raises:
        UserError: a limit below 1, ``max_model_len`` above the model's, ``overlap`` of a model that
            cannot, or a deterministic engine that computes less than a block of a prompt at once.
    """

    def __init__(
        self,
        runner: Runner,
        options: EngineOptions | None = None,
        tokenizer: Any = None,
        *,
        generation_config: GenerationConfig | None = None,
        chat_format: Callable[[], ChatFormat | None] = lambda: None,
        vocabulary: Callable[[], Any] | None = None,
        acceptance: AcceptanceRecord | None = None,
        expert_counts: ExpertCounts | None = None,
        name: str | None = None,
    ) -> None:
        self.closed = False
        self.options = options = options or EngineOptions()
        self.tokenizer = tokenizer
        self.vocab_size = runner.vocab_size
        self._generation_config = generation_config or GenerationConfig()
        self._get_chat_format = chat_format
        self._grammars = GrammarCompiler(vocabulary or (lambda: tokenizer), runner.vocab_size)
        self._name = name or f"over {type(runner).__name__}"
        self._expert_counts = expert_counts
        self._live: dict[Request, Generation] = {}
        config, lanes = scheduler_config(runner, options), runner.num_lanes
        self._runner = runner
        self.scheduler: AnyScheduler = (
            Scheduler(config) if lanes == 1 else LaneScheduler(config, lanes)
        )
        overlap = overlaps(runner, options)
        self._watch = None
        if acceptance is not None and options.force_accept is None:
            self._watch = AcceptanceWatch(acceptance)
        self._pipeline = StepPipeline(self.scheduler, runner, self._live, overlap, self._watch)
        own = (*runner.eos_token_ids, *self._generation_config.eos_token_ids)
        # An id beyond the vocabulary is never generated.
        self.eos_token_ids = tuple(dict.fromkeys(i for i in own if i < runner.vocab_size))
        self._late_kernels_before = late_kernels()
        self._steps_before = Counter(runner.step_counts)  # of loading

    def __getattr__(self, name: str) -> NoReturn:
        """Refuse what a closed engine no longer has."""
        if name in _FREED:
            raise UserError(f"this engine is closed ({self._name}); load another")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def default_params(self) -> SamplingParams:
        """The sampling parameters of requests that bring none, see ``generation_config``."""
        if self.options.generation_config == "none":
            return SamplingParams()
        return self._generation_config.params

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> None:
        """Queue a request; lower ``priority`` runs first, equal ones in order of arrival.

        Args:
            request_id: any string that no unfinished request has.
            prompt: a text, token ids, or a conversation as :meth:`Engine.chat_prompt` gives it;
                see :data:`~dsa_compile.runtime.requests.prompts.Prompt`.
            params: None for :attr:`default_params`.
            priority: an integer.
            cache_salt: the prefix cache is shared with requests of an equal one, None among them,
                and no others, so that response times reveal nothing of another tenant's prompts.

        Raises:
            RequestError: the id is taken or not a string; the prompt is empty, holds an id outside
                the vocabulary, or is text without a tokenizer; the request can never fit.
        """
        require_request_id(request_id)
        params = self.default_params if params is None else params
        if not isinstance(params, SamplingParams):
            raise RequestError(f"request {request_id!r}: params must be SamplingParams")
        require_options(request_id, priority, cache_salt)
        if isinstance(prompt, ChatPrompt) and params.skip_special_tokens:
            params = replace(params, skip_special_tokens=False)  # its parser reads some of them
        scheduler = self.scheduler
        prompt_ids = token_ids_of(request_id, prompt, self.vocab_size, self.tokenizer)
        # Before anything is sized by max_tokens, which may be huge.
        scheduler.check_admissible(request_id, len(prompt_ids), params.max_tokens)
        grammar = None if params.grammar is None else self.compile_grammar(params.grammar)()
        sampling = SamplingState(params, prompt_ids, self.eos_token_ids, self.vocab_size, grammar)
        parser: StreamParser | None = None
        if isinstance(prompt, ChatPrompt) and params.stop_strings:
            parser = prompt.parser()
        completion = Completion(params, self.eos_token_ids, self.tokenizer, parser)
        logprobs: list[TokenLogprobs] | None = None if params.logprobs is None else []
        scored: list[TokenLogprobs] | None = None if params.prompt_logprobs is None else []
        transcript = Transcript(prompt_ids, completion.pieces, logprobs, prompt_logprobs=scored)
        request = Request(
            request_id,
            prompt_ids,
            params.max_tokens,
            completion,
            priority,
            cache_salt,
            all_logits=scored is not None,
        )
        with Uninterrupted():
            scheduler.add(request)
            self._live[request] = Generation(sampling, completion, transcript)

    def compile_grammar(self, grammar: Grammar) -> Callable[[], GrammarState]:
        """Compile a grammar into the cache from which requests take it; in any thread.

        Raises:
            ParameterError: it cannot be compiled.
        """
        return self._grammars.compile(grammar, self.eos_token_ids)

    @property
    def grammar_tokenizer(self) -> Any:
        """The ``tokenizers.Tokenizer`` of grammars, read if need be; None if there is none."""
        return self._grammars.tokenizer()

    def step(self) -> list[RequestOutput]:
        """Finish one step; the requests that got a token or ended with it.

        A step that fails is run in parts, and a request that fails even alone ends with
        ``finish_reason="error"``. If the GPU fails, or the model raises what is no
        :class:`StepError`, the step and those launched after it are undone and the exception passes
        on: their requests are still there, to be tried again or aborted. So they are after an
        interrupt, but what the step would have returned is lost.

        Raises:
            DeviceLost: the GPU failed.
        """
        return [self._output(request) for request in self._pipeline.advance()]

    def waits(self, wake: Callable[[], None]) -> bool:
        """Whether the last :meth:`step` had nothing to run before pages arrive from elsewhere.

        If so, ``wake`` is called when some have, perhaps in another thread.
        """
        if self._pipeline.waits:
            self.scheduler.when_copied(wake)
        return self._pipeline.waits

    def wait(self) -> None:
        """Wait for pages if the last :meth:`step` had nothing to run before some arrive."""
        arrived = threading.Event()
        if self.waits(arrived.set):
            arrived.wait()

    def drain(self) -> list[RequestOutput]:
        """Finish the steps in flight and launch no other: no page is in use afterwards."""
        changed = dict.fromkeys(self._pipeline.drain())
        return [self._output(request) for request in changed]

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request now and return what it has, or None if it is unknown or was reported as
        finished.

        Raises:
            RequestError: the id is not one that a request can have.
        """
        require_request_id(request_id)
        scheduler = self.scheduler
        with Uninterrupted():
            request = scheduler.abort(request_id)
            if request is None:  # an interrupt may have kept its end from being reported
                ended = (r for r in self._live if r.finish_reason is not None)
                request = next((r for r in ended if r.request_id == request_id), None)
            return None if request is None else self._output(request)

    def check(self) -> None:
        """Do nothing while the engine can run steps; for an engine that waits for requests.

        Raises:
            DeviceLost: another rank has ended, and so every step would fail.
        """
        if isinstance(self._runner, Watched):
            self._runner.check()

    def has_unfinished(self) -> bool:
        """Whether :meth:`step` has anything to do: a request waits or runs, or a step is in flight.

        The last step may hold nothing but requests that have ended meanwhile.
        """
        return self.scheduler.has_unfinished() or self._pipeline.busy

    def stats(self) -> SchedulerStats:
        """Requests, blocks, preemptions, prefix hits, steps by kind, failures, drafts and more."""
        return replace(
            self.scheduler.stats(),
            memory_failures=self._pipeline.smaller.memory_failures,
            op_failures=self._pipeline.smaller.op_failures,
            drafted=tuple(self._pipeline.drafts.drafted),
            accepted=tuple(self._pipeline.drafts.accepted),
            force_accept=self.options.force_accept,
            acceptance_problem="" if self._watch is None else self._watch.problem,
            late_kernels=late_kernels() - self._late_kernels_before,
            step_counts=Counter(self._runner.step_counts) - self._steps_before,
            wait_seconds=self._pipeline.wait_seconds,
            expert_tokens={} if self._expert_counts is None else self._expert_counts.tokens(),
        )

    def close(self) -> None:
        """Drop unfinished requests and free weights, caches and graphs; the engine is of no use
        afterwards. Closing it again does nothing.

        A runner that the caller made stays alive as long as the caller keeps it.
        """
        if self.closed:
            return
        for request in list(self._live):
            self.abort(request.request_id)
        try:
            self.drain()
        except StepError:
            pass  # there is nobody left whom it could concern
        finally:
            with Uninterrupted():  # other ranks end meanwhile
                self._live.clear()
                self.closed = True
                for name in _FREED:
                    delattr(self, name)
                gc.collect()  # graphs and their pools hang together in cycles
                if torch.cuda.is_initialized():
                    torch.cuda.empty_cache()

    def __repr__(self) -> str:
        """The model, and what the engine is doing."""
        if self.closed:
            return f"<{type(self).__name__} {self._name}: closed>"
        stats, runner = self.scheduler.stats(), self._runner
        blocks = runner.num_blocks * runner.num_lanes
        return (
            f"<{type(self).__name__} {self._name}: {blocks - stats.free_blocks:,} of "
            f"{blocks:,} blocks used, {stats.running} running, {stats.waiting} waiting>"
        )

    def _output(self, request: Request) -> RequestOutput:
        """Output of ``request`` so far; forgets the request if it is finished."""
        output = self._live[request].output(request)
        if request.finish_reason is not None:
            del self._live[request]
        return output
