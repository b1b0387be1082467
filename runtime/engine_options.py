"""Options of an engine, all in one place: the scheduler's and the loader's come from them."""

import math
from dataclasses import dataclass
from pathlib import Path

from dsa_compile.common.keyword_names import changed_fields, suggests_names
from dsa_compile.errors import UserError

DETERMINISTIC_ROWS = 32
"""Rows to which every decode step of a deterministic engine is padded, so that all of them run the
same kernels and no row depends on the others."""

LOAD_FORMATS = ("auto", "dummy")
GENERATION_CONFIGS = ("auto", "none")
COLLECTIVES = ("nccl", "symmetric", "replay")
DRAFTS = ("mtp", "ngram", "none")
MOST_DRAFTS = 4
_LIMITS = ("num_blocks", "max_batched_tokens", "max_running", "max_model_len", "draft_max_rows")
_OPTIONAL_LIMITS = ("num_blocks", "max_model_len", "draft_max_rows")
_FLAGS = (
    "enable_prefix_cache", "deterministic", "cuda_graphs", "debug_launches", "skip_tokenizer",
    "count_experts",
)  # fmt: skip
# Names of the same options in other engines.
OTHER_NAMES = {
    "max_num_seqs": "max_running",
    "max_running_requests": "max_running",
    "max_batch_size": "max_running",
    "max_num_batched_tokens": "max_batched_tokens",
    "max_num_tokens": "max_batched_tokens",
    "chunked_prefill_size": "max_batched_tokens",
    "max_seq_len": "max_model_len",
    "context_length": "max_model_len",
    "num_gpu_blocks_override": "num_blocks",
    "mem_fraction_static": "gpu_memory_utilization",
    "enable_prefix_caching": "enable_prefix_cache",
    "enforce_eager": "cuda_graphs",
    "skip_tokenizer_init": "skip_tokenizer",
}


@suggests_names(OTHER_NAMES)
@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Options of an engine.

    An engine over a runner of one's own heeds those of batching, up to ``deterministic``; the
    others say how an artifact is loaded.

    Args:
        max_batched_tokens: most tokens one step computes; longer prompts are computed in chunks.
        max_running: most requests one step can hold.
        max_model_len: most tokens, prompt and generated, of one request; None for the model's own
            limit.
        enable_prefix_cache: reuse the cache rows of earlier requests with the same prefix.
        overlap: launch the next step while one runs; None where the model runs on a GPU. That a
            request ended is then seen one step late, which costs that step a row.
        deterministic: a request's tokens must not depend, to the last bit of its logits, on what
            runs beside it: prompts are computed alone in chunks of ``max_batched_tokens`` (rounded
            down to whole blocks), decode steps hold at most 32 requests. Slower under load.
        num_blocks: blocks of each cache; None for what the GPU's memory holds, and on the CPU for
            65,536 tokens, or for the model's longest sequence if that is shorter.
        gpu_memory_utilization: share of the GPU's memory to use where ``num_blocks`` is None, in
            (0, 1].
        cuda_graphs: on a GPU, run decode steps as CUDA graphs, captured on loading.
        mixed_graph_tokens: on a GPU and with ``cuda_graphs``, also capture steps of so many tokens
            that compute prompts, alone or beside decoding requests. A step is padded to the next
            of these sizes if that at most doubles it. Their temporaries stay allocated.
        shipped_kernels: run the machine code of CUDA kernels that the artifact holds. It can do
            whatever this process may do on the GPU. If not, kernels come from this user's cache
            (:func:`~dsa_compile.kernels.cuda.compiler.cache_dir`), where ``dsa-compile`` puts them
            too, or are compiled on loading. None: only if ``digest`` is given.
        load_format: ``auto`` for the model's weights, ``dummy`` for random ones.
        verify: check the weight files' contents (``full``) or their headers (``header``).
        digest: load this artifact and no other: the ``digest`` in its ``manifest.json``, which
            covers all of its files, and the weights as far as ``verify`` compares them. None loads
            any.
        model_dir: where the referenced weights are now, if not where they were compiled from.
        debug_launches: on a GPU, launch every op by itself and wait for it, so that an op that
            fails on the GPU is named; slow. No CUDA graphs, no overlap, one stream.
        generation_config: ``auto`` takes the sampling parameters in the model's
            ``generation_config.json`` where a request brings none; ``none`` takes those of
            :class:`SamplingParams`. The end tokens in that file count either way.
        skip_tokenizer: load no tokenizer; the engine works in token ids alone.
        draft: how tokens are drafted: ``mtp`` with the plans of an artifact compiled with ``--draft
            mtp``, ``ngram`` by looking up the last tokens earlier in the request, ``none``. None:
            ``mtp`` if the artifact has the plans.
        num_speculative_tokens: the most tokens drafted for a request in a step, 0 to 4. None: as
            the artifact was compiled for, 3 with ``ngram``.
        draft_max_rows: while more requests than these run (of a lane, where there are several),
            steps check no drafts: under load their rows cost more time than they save. None:
            however many run.
        force_accept: with ``mtp``, and to time random weights: tokens that a step keeps of a
            request on average, 1 to ``1 + num_speculative_tokens``, whichever of its drafts are
            right. The tokens are not the model's. None: those up to the first wrong draft.
        count_experts: count the tokens that every routed expert of every layer gets, for
            ``Engine.stats()``; costs a few small kernels a layer.
        rank_timeout: seconds that a rank of several waits in a step for the others, > 0; then the
            engine ends with a message that names the one that did not come.
        collectives: how ranks on GPUs sum and exchange: ``nccl``; or ``symmetric``, few rows by
            kernels that store to the memory of all GPUs; on a CPU, gloo. ``replay`` loads one rank
            without the others: collectives make results of the right shape from its own operand,
            and on a GPU take the time that was measured elsewhere. Times are projections then, and
            what is generated means nothing.
        rank: with ``collectives="replay"``, the rank to load, from 0.
        ranks: with it, how many ranks the artifact must be of. None for any number.
        latencies: with it, a JSON file of collectives' times, which stand in for those that come
            with the package. None for none.

    Raises:
        UserError: a value has the wrong type or is out of its range, two options contradict each
            other, or a name is none of these.
    """

    max_batched_tokens: int = 2048
    max_running: int = 256
    max_model_len: int | None = None
    enable_prefix_cache: bool = True
    overlap: bool | None = None
    deterministic: bool = False
    num_blocks: int | None = None
    gpu_memory_utilization: float = 0.9
    cuda_graphs: bool = True
    mixed_graph_tokens: tuple[int, ...] = ()
    shipped_kernels: bool | None = None
    load_format: str = "auto"
    verify: str = "full"
    digest: str | None = None
    model_dir: str | Path | None = None
    debug_launches: bool = False
    generation_config: str = "auto"
    skip_tokenizer: bool = False
    draft: str | None = None
    num_speculative_tokens: int | None = None
    draft_max_rows: int | None = None
    force_accept: float | None = None
    count_experts: bool = False
    rank_timeout: float = 60.0
    collectives: str = "nccl"
    rank: int | None = None
    ranks: int | None = None
    latencies: str | Path | None = None

    def __post_init__(self) -> None:
        for name in _LIMITS:
            value = getattr(self, name)
            if value is None and name in _OPTIONAL_LIMITS:
                continue
            if type(value) is not int or value < 1:
                raise UserError(f"{name} must be an integer >= 1; got {value!r}")
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise UserError(f"{name} must be True or False; got {getattr(self, name)!r}")
        sizes = self.mixed_graph_tokens
        if not isinstance(sizes, tuple) or any(type(n) is not int or n < 1 for n in sizes):
            raise UserError(f"mixed_graph_tokens must be a tuple of integers >= 1; got {sizes!r}")
        share = self.gpu_memory_utilization
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
            raise UserError(f"gpu_memory_utilization={share!r} must be in (0, 1]")
        seconds = self.rank_timeout
        if not (_is_finite(seconds) and 0 < seconds <= 1e6):
            raise UserError(f"rank_timeout={seconds!r} must be a number of seconds in (0, 1e6]")
        self._one_of("load_format", LOAD_FORMATS)
        self._one_of("generation_config", GENERATION_CONFIGS)
        self._one_of("collectives", COLLECTIVES)
        self._check_replay()
        if self.draft is not None:
            self._one_of("draft", DRAFTS)
        count = self.num_speculative_tokens
        if count is not None and not (type(count) is int and 0 <= count <= MOST_DRAFTS):
            raise UserError(f"num_speculative_tokens={count!r} must be from 0 to {MOST_DRAFTS}")
        if count and self.draft == "none":
            raise UserError(f"num_speculative_tokens={count} contradicts draft='none'")
        pinned = self.force_accept
        if pinned is not None and not (_is_finite(pinned) and 1 <= pinned <= 1 + MOST_DRAFTS):
            raise UserError(
                f"force_accept={pinned!r} must be a number of tokens from 1 to {1 + MOST_DRAFTS}"
            )
        if self.debug_launches and self.overlap:
            raise UserError("debug_launches=True waits for every op; leave out overlap=True")

    def _check_replay(self) -> None:
        for name, least in (("rank", 0), ("ranks", 2)):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < least):
                raise UserError(f"{name} must be an integer >= {least}; got {value!r}")
        given = [n for n in ("rank", "ranks", "latencies") if getattr(self, n) is not None]
        if self.collectives == "replay" and self.rank is None:
            raise UserError("collectives='replay' loads one rank: give its number, rank (--rank)")
        if given and self.collectives != "replay":
            raise UserError(
                f"{' and '.join(given)}: of a rank without the others; give collectives='replay' "
                "(--collectives replay) with it"
            )

    @property
    def rows(self) -> int:
        """Requests that one step has at most."""
        if not self.deterministic:
            return self.max_running
        return min(self.max_running, DETERMINISTIC_ROWS)

    @property
    def padded_rows(self) -> int:
        """Rows of the largest step that a runner is made for."""
        return DETERMINISTIC_ROWS if self.deterministic else self.max_running

    @property
    def runs_shipped_kernels(self) -> bool:
        """Whether the artifact's machine code is run."""
        return self.digest is not None if self.shipped_kernels is None else self.shipped_kernels

    @property
    def looks_up_drafts(self) -> bool:
        """Whether drafts are looked up among a request's own tokens."""
        return self.draft == "ngram" and self.num_speculative_tokens != 0

    @property
    def wants_overlap(self) -> bool | None:
        """``overlap``, which launches that are waited for one by one rule out."""
        return False if self.debug_launches else self.overlap

    def __repr__(self) -> str:
        """The options that differ from their defaults."""
        return f"EngineOptions({', '.join(f'{n}={v!r}' for n, v in changed_fields(self))})"

    def _one_of(self, name: str, choices: tuple[str, ...]) -> None:
        if getattr(self, name) not in choices:
            raise UserError(f"{name}={getattr(self, name)!r}: choose one of {', '.join(choices)}")


def _is_finite(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return math.isfinite(value)
