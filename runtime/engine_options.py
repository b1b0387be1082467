"""Options of an engine, all in one place: the scheduler's and the loader's come from them."""

from dataclasses import dataclass
from pathlib import Path

from dsa_compile.common.option_keywords import has_options
from dsa_compile.common.options import changed_fields, check, option
from dsa_compile.errors import OptionValueError

DETERMINISTIC_ROWS = 32
"""Rows to which every decode step of a deterministic engine is padded, so that all of them run the
same kernels and no row depends on the others."""

MOST_DRAFTS = 4


@has_options
@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Options of an engine.

    An engine over a runner of one's own heeds those of batching, up to ``deterministic``; the
    others say how an artifact is loaded.

    Raises:
        UserError: a value has the wrong type or is out of its range, two options contradict each
            other, or a name is none of these.
    """

    max_num_batched_tokens: int = option(
        2048, "most tokens that one step computes; longer prompts are computed in chunks",
        unit="tokens", least=1, was=("max_batched_tokens",),
        like=("max_num_tokens", "chunked_prefill_size"),
    )  # fmt: skip
    max_num_seqs: int = option(
        256, "most requests that one step can hold", unit="requests", least=1, was=("max_running",),
        like=("max_running_requests", "max_batch_size"),
    )  # fmt: skip
    max_model_len: int | None = option(
        None, "most tokens of one request, prompt and generated", unset="the model's limit",
        unit="tokens", least=1, like=("max_seq_len", "context_length"),
    )  # fmt: skip
    enable_prefix_caching: bool = option(
        True, "reuse the cache rows of earlier requests with the same prefix",
        was=("enable_prefix_cache",),
    )  # fmt: skip
    async_scheduling: bool | None = option(
        None, "launch the next step while one runs; that a request ended is then seen one step "
        "late, which costs that step a row", unset="where the model runs on a GPU",
        was=("overlap",),
    )  # fmt: skip
    deterministic: bool = option(
        False, "a request's tokens do not depend, to the last bit of its logits, on what runs "
        "beside it: prompts are computed alone in chunks of {max_num_batched_tokens} (rounded down "
        f"to whole blocks), decode steps hold at most {DETERMINISTIC_ROWS} requests; slower under "
        "load",
    )  # fmt: skip
    num_gpu_blocks_override: int | None = option(
        None, "blocks of each cache", unit="blocks", least=1, was=("num_blocks",),
        unset="what the GPU's memory holds; on the CPU, for 65,536 tokens or for the model's "
        "longest sequence if that is shorter",
    )  # fmt: skip
    gpu_memory_utilization: float = option(
        0.9, "share of a GPU's memory to use, where {num_gpu_blocks_override} is not given",
        least=0, most=1, above=True, also=("gpu_memory_util",), like=("mem_fraction_static",),
    )  # fmt: skip
    enforce_eager: bool = option(
        False, "on a GPU, launch every kernel of every step, and capture no CUDA graphs on loading",
        was=("no_cuda_graphs",),
    )  # fmt: skip
    mixed_graph_tokens: tuple[int, ...] = option(
        (), "on a GPU, also capture steps of so many tokens, such as 512,2048, that compute "
        "prompts, alone or beside decoding requests; a step is padded to the next of these sizes "
        "if that at most doubles it, and their temporaries stay allocated", unit="tokens", least=1,
        several="commas",
    )  # fmt: skip
    shipped_kernels: bool | None = option(
        None, "run the machine code of CUDA kernels in the artifact, which may do whatever this "
        "process may do on the GPU; if not, they are taken from your cache or compiled on loading",
        unset="only with {digest}",
    )  # fmt: skip
    load_format: str = option(
        "auto", "auto: the model's weights; dummy: random ones", choices=("auto", "dummy")
    )
    verify: str = option(
        "full", "check the weight files' contents (full) or their headers (header)",
        choices=("full", "header"),
    )  # fmt: skip
    digest: str | None = option(
        None, "load the artifact with this digest in its manifest.json, and no other; it covers "
        "all of its files, and the weights as far as {verify} compares them", metavar="SHA256",
    )  # fmt: skip
    model_dir: str | Path | None = option(
        None, "the model's weights, if they moved since dsa-compile ran", metavar="DIR"
    )
    debug_launches: bool = option(
        False, "on a GPU, wait for every op, so that one that fails on the GPU is named; slow: no "
        "CUDA graphs, no step ahead, one stream",
    )  # fmt: skip
    generation_config: str = option(
        "auto", "auto: sampling parameters that a request does not bring are those of the model's "
        "generation_config.json; none: those of SamplingParams; its end tokens count either way",
        choices=("auto", "none"),
    )  # fmt: skip
    skip_tokenizer_init: bool = option(
        False, "load no tokenizer; the engine works in token ids alone", was=("skip_tokenizer",)
    )
    draft: str | None = option(
        None, "draft tokens with the artifact's draft plans (mtp), or by looking up the last "
        "tokens earlier in the request (ngram)", choices=("mtp", "ngram", "none"),
        unset="mtp if the artifact has the plans",
    )  # fmt: skip
    num_speculative_tokens: int | None = option(
        None, "most tokens drafted for a request in a step", unit="tokens", least=0,
        most=MOST_DRAFTS, unset="as compiled; 3 with ngram",
    )  # fmt: skip
    draft_max_rows: int | None = option(
        None, "check no drafts while more requests than these run in a lane: under load their rows "
        "cost more time than they save", unit="requests", least=1, unset="always check them",
    )  # fmt: skip
    force_accept: float | None = option(
        None, "to time random weights, with draft mtp: keep so many tokens of a step on average, "
        "right or wrong, up to one more than {num_speculative_tokens}", unit="tokens", least=1,
        most=1 + MOST_DRAFTS,
    )  # fmt: skip
    count_experts: bool = option(
        False, "count the tokens that every routed expert of every layer gets, for /metrics and "
        "Engine.stats(); costs a few small kernels a layer",
    )  # fmt: skip
    rank_timeout: float = option(
        60.0, "of several ranks, how long one waits in a step for the others; then the engine ends "
        "with a message that names the one that did not come", unit="seconds", least=0, most=10**6,
        above=True,
    )  # fmt: skip
    collectives: str = option(
        "nccl", "who sums and gathers for ranks on GPUs: nccl, or symmetric, which does it for few "
        "rows by kernels that store to the memory of all GPUs (on a CPU, gloo); replay loads one "
        "rank without the others and takes the times that were measured elsewhere: times are "
        "projections then, and what is generated means nothing",
        choices=("nccl", "symmetric", "replay"),
    )  # fmt: skip
    rank: int | None = option(
        None, "with {collectives} replay: the rank to load, from 0", metavar="R", least=0
    )
    ranks: int | None = option(
        None, "with {collectives} replay: how many ranks the artifact must be of", unit="ranks",
        least=2, also=("of",),
    )  # fmt: skip
    latencies: str | Path | None = option(
        None, "with {collectives} replay: a JSON file of collectives' times, which stand in for "
        "those that come with the package", metavar="FILE",
    )  # fmt: skip

    def __post_init__(self) -> None:
        check(self)
        if self.num_speculative_tokens and self.draft == "none":
            raise OptionValueError(
                "{num_speculative_tokens}={} contradicts {draft}='none'",
                self.num_speculative_tokens,
            )
        if self.debug_launches and self.async_scheduling:
            raise OptionValueError(
                "{debug_launches} waits for every op; leave out {async_scheduling}"
            )
        given = [n for n in ("rank", "ranks", "latencies") if getattr(self, n) is not None]
        if self.collectives == "replay" and self.rank is None:
            raise OptionValueError("{collectives}='replay' loads one rank: give its number, {rank}")
        if given and self.collectives != "replay":
            names = " and ".join(f"{{{name}}}" for name in given)
            raise OptionValueError(
                f"{names}: of a rank without the others; give {{collectives}}='replay' with it"
            )

    @property
    def rows(self) -> int:
        """Requests that one step has at most."""
        if not self.deterministic:
            return self.max_num_seqs
        return min(self.max_num_seqs, DETERMINISTIC_ROWS)

    @property
    def padded_rows(self) -> int:
        """Rows of the largest step that a runner is made for."""
        return DETERMINISTIC_ROWS if self.deterministic else self.max_num_seqs

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
        """``async_scheduling``, which launches that are waited for one by one rule out."""
        return False if self.debug_launches else self.async_scheduling

    def __repr__(self) -> str:
        """The options that differ from their defaults."""
        return f"EngineOptions({', '.join(f'{n}={v!r}' for n, v in changed_fields(self))})"
