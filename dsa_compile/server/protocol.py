"""Messages between the HTTP process and an engine process: MessagePack of msgspec structs.

Both ends are of one installation, so there are no versions. Requests have string ids, unique for
the life of an engine process; an engine sends one :class:`Step` for each step, with the new tokens
of all its requests.
"""

from typing import Any, Literal

import msgspec

from dsa_compile.runtime.requests.grammar import Grammar
from dsa_compile.runtime.requests.logprobs import TokenLogprobs
from dsa_compile.runtime.requests.sampling_params import SamplingParams
from dsa_compile.runtime.scheduling.limits import SchedulerConfig
from dsa_compile.runtime.scheduling.stats import SchedulerStats

FinishReason = Literal["stop", "length", "abort", "error"]
ENGINE_FAILED = 1
"""The status of an engine process that has sent :class:`Lost`."""


class EngineOptions(msgspec.Struct, frozen=True):
    """Options of an engine process: the arguments of ``Engine.load`` of the same names.

    Attributes:
        artifact: the directory.
        address: of the socket to connect to.
        engine: further arguments of ``Engine.load``.
        log_format: see :mod:`dsa_compile.server.logs`.
        log_level: likewise.
    """

    artifact: str
    address: str
    engine: dict[str, Any]
    log_format: str = "text"
    log_level: str = "info"


class Add(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Queue a request.

    Attributes:
        request_id: of the request.
        prompt: token ids.
        params: without stop strings, for those are the HTTP process's.
        priority: lower runs first.
        cache_salt: cached prefixes are shared with requests of an equal one alone.
    """

    request_id: str
    prompt: list[int]
    params: SamplingParams
    priority: int = 0
    cache_salt: str | None = None


class Abort(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """End requests, and the compilation of grammars, now and send nothing more of them; unknown and
    finished ones are skipped."""

    request_ids: list[str]


class ReportStats(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Send a :class:`Step` with statistics, now."""


class CompileGrammar(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Compile a grammar before a request comes with it; answered by :class:`Compiled`."""

    request_id: str
    grammar: Grammar


ToEngine = Add | Abort | ReportStats | CompileGrammar


class Ready(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The engine is loaded and takes requests.

    Attributes:
        limits: of the engine's scheduler.
        vocab_size: token ids of the model, from 0.
        eos_token_ids: the model's own end tokens.
    """

    limits: SchedulerConfig
    vocab_size: int
    eos_token_ids: tuple[int, ...]


class Delta(msgspec.Struct, array_like=True):
    """New tokens of one request.

    Attributes:
        request_id: of the request.
        token_ids: that the step made, none or several.
        finish_reason: None while the request runs.
        cached_tokens: prompt tokens whose cache rows were reused.
        error: what went wrong where ``finish_reason`` is "error".
        logprobs: one entry a token where the request wants them.
        scheduled_at: when the request first got cache blocks, seconds of ``time.perf_counter``,
            a clock that both processes share.
        prompt_logprobs: with the first token, one entry a prompt token but the first, likewise.
    """

    request_id: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0
    error: str | None = None
    logprobs: list[TokenLogprobs] = []
    scheduled_at: float | None = None
    prompt_logprobs: list[TokenLogprobs] = []


class Stats(msgspec.Struct, array_like=True, frozen=True):
    """Counts at one moment.

    Attributes:
        engine: its own, without the tokens of experts.
        step_seconds: that its steps took since the start.
        busiest_experts: by layer, the tokens of the busiest routed expert over those of an average
            one, where they are counted.
    """

    engine: SchedulerStats
    step_seconds: float
    busiest_experts: dict[int, float] = {}


class Step(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Results of one step, of all requests that it changed; some steps have ``stats`` too."""

    deltas: list[Delta]
    stats: Stats | None = None


class Rejected(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """A request that cannot be served, and why."""

    request_id: str
    message: str


class Lost(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The engine cannot go on; its process ends, and all its requests with it."""

    message: str


class Compiled(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Answer to :class:`CompileGrammar`: ``problem`` is None if a request may use the grammar."""

    request_id: str
    problem: str | None


FromEngine = Ready | Step | Rejected | Lost | Compiled
