"""``load_runner``: from an artifact directory to a runner: graphs, weights, caches."""

import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import torch

from dsa_compile.artifact.interface import read_regions
from dsa_compile.artifact.manifest import Manifest
from dsa_compile.artifact.reader import Artifact
from dsa_compile.errors import ArtifactError, OptionValueError, UserError
from dsa_compile.facts.layout import ONE_RANK
from dsa_compile.ir.plan import SHORT
from dsa_compile.kernels.cuda.shipped import NO_KERNELS, ShippedKernels
from dsa_compile.kernels.late_kernels import kernels_expected
from dsa_compile.launches.step_sizes import StepLimits
from dsa_compile.runtime.engine_options import DETERMINISTIC_ROWS, EngineOptions
from dsa_compile.runtime.execution.devices import device_of
from dsa_compile.runtime.execution.executor import require_kernels
from dsa_compile.runtime.execution.graph_plan import GraphPlan
from dsa_compile.runtime.execution.model_runner import ModelRunner
from dsa_compile.runtime.failures.step_errors import is_out_of_memory, shortage
from dsa_compile.runtime.loading.drafts import drafts_of
from dsa_compile.runtime.loading.kernel_preparation import prepare_kernels
from dsa_compile.runtime.loading.memory_plan import StepSizes, measure_memory
from dsa_compile.runtime.loading.peers import Alone, Peers
from dsa_compile.runtime.loading.weight_loading import WeightLoad
from dsa_compile.runtime.pages.kinds import GIB
from dsa_compile.weights.plan import WeightPlan
from dsa_compile.weights.sharing import homes_of, weight_homes

# Caches for this many tokens, or for the model's longest sequence if that is shorter, by default.
DEFAULT_CACHE_TOKENS = 65_536
_LOG = logging.getLogger(__name__)
_MOST_ROWS = 2**31 - 1  # the graphs number cache rows in int32


def load_runner(
    path: Path | str, options: EngineOptions | None = None, peers: Peers | None = None
) -> ModelRunner:
    """Open an artifact, load its weights and make caches; on a GPU, make the kernels of all steps
    ready and capture decode steps. Each phase is logged when it is done, at level INFO.

    Args:
        path: the artifact.
        options: how; those of prompts and of batching are not used.
        peers: the ranks that load the artifact together, each its part of the weights; None for one
            rank. Collectives must reach them (:func:`~dsa_compile.ops.collectives.communicating`).

    Raises:
        ArtifactError: not a sound artifact or not the one of ``digest``, compiled for inspection
            only or for another device, one of its kernels is not installed, or its weights are
            missing or not the ones compiled.
        CheckpointError: the model's files do not hold what the artifact needs.
        UserError: an option is not what it may be, or more blocks than int32 numbers; or weights,
            caches or graphs do not fit into memory.
        StepError: an op failed when the first steps were run.
    """
    options, peers = options or EngineOptions(), peers or Alone()
    model_dir = None if options.model_dir is None else Path(options.model_dir)
    rows, num_blocks = options.padded_rows, options.num_gpu_blocks_override
    clock = _Clock()
    with ExitStack() as opened:
        opened.enter_context(kernels_expected())
        artifact = opened.enter_context(_opened(path, options.verify, options.digest))
        manifest = artifact.manifest
        require_runnable(artifact, options.load_format)
        most = _MOST_ROWS // manifest.block_size
        drafts = drafts_of(artifact.path, manifest, options)
        if drafts.count and options.mixed_graph_tokens:
            raise UserError(
                f"mixed_graph_tokens={options.mixed_graph_tokens!r}: steps are not captured with "
                "prompts while tokens are drafted; leave it out, or load with draft='none' "
                "(--draft none)"
            )
        if num_blocks is not None and num_blocks > most:
            raise OptionValueError(
                "{num_gpu_blocks_override} must be from 1 to {}; got {}", most, num_blocks
            )
        if model_dir is not None and manifest.weights.mode == "pack":
            raise UserError(
                f"{artifact.path}: holds its weights itself and takes none from {model_dir}; "
                "leave out --model-dir"
            )
        device = device_of(manifest.target)
        regions = read_regions(artifact, rehearse=device.type == "cuda")
        # Before the weights: those of a large model take minutes.
        require_kernels(regions.values(), manifest.kernels, manifest.target)
        shipped = _shipped_kernels(artifact) if options.runs_shipped_kernels else NO_KERNELS
        clock.done(
            f"artifact opened: variants {', '.join(manifest.variants) or 'one'}"
            + _about_kernels(artifact, shipped)
        )
        load = opened.enter_context(_loading(artifact, model_dir, options.load_format, peers.rank))
        if not load.later:
            clock.done(f"weights: {load.nbytes / GIB:.2f} GiB")
        spec = manifest.model.spec
        longest = spec.max_position_embeddings
        context = min(options.max_model_len or longest, longest)
        if device.type == "cuda":
            # A deterministic decode step is padded to so many rows; drafts are rows of their own.
            most_rows = max(rows * (1 + drafts.count), DETERMINISTIC_ROWS)
            limits = StepLimits(context, options.max_num_batched_tokens, most_rows)
            with shipped.in_use():
                prepared = prepare_kernels(manifest, regions.values(), limits)
            clock.done(prepared.describe())
        plan = mixed = None
        captured = not (options.enforce_eager or options.debug_launches)
        captured = captured and (drafts.planned or not drafts.count)
        if captured and device.type == "cuda":
            plan_of = partial(
                GraphPlan.of,
                max_num_seqs=rows,
                max_model_len=context,
                block_size=manifest.block_size,
                topk=spec.index_topk if SHORT in manifest.variants else None,
            )
            plan = plan_of(
                deterministic=options.deterministic,
                num_drafts=drafts.count,
                draft_max_rows=options.draft_max_rows,
            )
            most_tokens = options.max_num_batched_tokens
            if sizes := [min(size, most_tokens) for size in options.mixed_graph_tokens]:
                mixed = plan_of(mixed_tokens=sizes)
        planned_bytes = None
        if num_blocks is None:
            tokens = min(DEFAULT_CACHE_TOKENS, longest)
            num_blocks = -(-tokens // manifest.block_size)
            if device.type == "cuda":
                largest = StepSizes(options.max_num_batched_tokens, rows, context, 1 + drafts.count)
                share = options.gpu_memory_utilization
                peers.least("weights", 0)  # steps of all ranks run together
                memory = measure_memory(
                    manifest, regions, load.weights, largest, plan, share, shipped, mixed
                )
                num_blocks = min(memory.num_blocks, most)
                planned_bytes = memory.planned
                clock.done(memory.describe(manifest.block_size))
        num_blocks = peers.least("blocks", num_blocks)
        if options.force_accept is not None:
            _LOG.warning(
                "acceptance forced: a step keeps %g tokens on average, right or wrong; what is "
                "generated is not the model's",
                options.force_accept,
            )
        runner = ModelRunner(
            manifest,
            regions,
            load.weights,
            num_blocks,
            rows,
            options.deterministic,
            debug_launches=options.debug_launches,
            shipped_kernels=shipped,
            count_experts=options.count_experts,
            num_drafts=drafts.count,
            plans=manifest.plans if drafts.planned else None,
            force_accept=options.force_accept,
        )
        runner.planned_bytes = planned_bytes
        for graphs in filter(None, (plan, mixed)):
            _capture(runner, graphs, rows)
            clock.done(graphs.describe(manifest.block_size))
        if runner.expert_counts is not None:
            runner.expert_counts.reset()
        if load.later:
            load.finish()
            clock.done(f"weights: {load.nbytes / GIB:.2f} GiB, read meanwhile")
        if artifact.settle():
            clock.done("weights are the ones compiled")
        return runner


@contextmanager
def _opened(path: Path | str, verify: str, digest: str | None) -> Iterator[Artifact]:
    """An artifact whose weight files are hashed while they are loaded and graphs captured."""
    artifact = Artifact.open(path, verify, later=True, digest=digest)
    try:
        yield artifact
    finally:
        artifact.abandon()


@contextmanager
def _loading(
    artifact: Artifact, model_dir: Path | None, load_format: str, rank: int
) -> Iterator[WeightLoad]:
    """Weights, which may be read while steps are measured and graphs captured."""
    try:
        load = WeightLoad(artifact, model_dir, load_format, rank)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        device = device_of(artifact.manifest.target)
        raise UserError(_no_memory_for_weights(artifact, device)) from None
    try:
        yield load
    finally:
        load.abandon()


def _shipped_kernels(artifact: Artifact) -> ShippedKernels:
    """The artifact's machine code, as bytes that were checked."""
    return ShippedKernels(
        {Path(path).stem: artifact.read_bytes(path) for path in _kernel_files(artifact)}
    )


def _about_kernels(artifact: Artifact, shipped: ShippedKernels) -> str:
    if shipped:
        return f", runs the {len(shipped)} compiled kernels in it"
    if count := len(_kernel_files(artifact)):
        return (
            f", does not run the {count} compiled kernels in it: if you trust who made it, "
            "load with shipped_kernels=True (--shipped-kernels) or with its digest (--digest)"
        )
    return ""


def _kernel_files(artifact: Artifact) -> list[str]:
    return [file.path for file in artifact.manifest.files if file.path.startswith("kernels/")]


def _capture(runner: ModelRunner, plan: GraphPlan, max_num_seqs: int) -> None:
    what = "steps with prompts" if plan.mixed_tokens else "decode steps"
    try:
        runner.capture(plan)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise OptionValueError(
            "GPU memory: no room to capture {} of up to {} requests beside {} blocks: {}; lower "
            "{max_num_seqs}, {num_gpu_blocks_override} or {gpu_memory_utilization}, or load "
            "without CUDA graphs, {enforce_eager}",
            what, max_num_seqs, runner.num_blocks, shortage(error),
        ) from None  # fmt: skip


def _no_memory_for_weights(artifact: Artifact, device: torch.device) -> str:
    plan = artifact.manifest.weights.plan
    assert plan is not None, "see require_runnable"
    entries = WeightPlan.from_json(artifact.read_json(plan))
    homes = weight_homes(artifact.manifest.calls, entries)
    needed = sum(
        entries.entries(call.kind)[key].nbytes
        for call in artifact.manifest.calls
        for key in homes_of(homes, call.name)
    )
    ways = "compile fewer --layers or a recipe with smaller weights"
    if device.type == "cpu":
        return f"memory: the weights need {needed / GIB:.1f} GiB and this machine has less; {ways}"
    free, total = torch.cuda.mem_get_info(device)
    others = max(0, total - free - torch.cuda.memory_reserved(device))
    return (
        f"GPU memory: the weights need {needed / GIB:.1f} GiB; the GPU has {total / GIB:.1f}, of "
        f"which {others / GIB:.1f} are taken by CUDA and by other processes; {ways}, or free what "
        "else runs on it"
    )


class _Clock:
    def __init__(self) -> None:
        self._since = time.perf_counter()

    def done(self, what: str) -> None:
        """Log a phase and how long it took."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        now = time.perf_counter()
        _LOG.info("%s (%.1f s)", what, now - self._since)
        self._since = now


def require_runnable(artifact: Artifact, load_format: str = "auto") -> None:
    """Raise ArtifactError if it was compiled to be read and not run."""
    manifest = artifact.manifest
    if manifest.compile.stop_after:
        raise ArtifactError(
            f"{artifact.path}: compiled with --stop-after {manifest.compile.stop_after}, "
            "for inspection; compile without it to run"
        )
    if manifest.weights.mode == "none" and load_format != "dummy":
        raise ArtifactError(
            f"{artifact.path}: compiled with --weights none, it holds graphs only; "
            "compile with --weights reference or pack to run, or load random weights "
            "(load_format='dummy')"
        )
    if manifest.weights.plan is None:
        raise ArtifactError(f"{artifact.path}: it has no weight plan; recompile")


def require_one_rank(path: Path, manifest: Manifest, what: str) -> None:
    """Raise UserError if an artifact was compiled for several ranks.

    Args:
        path: of it.
        manifest: of it.
        what: runs it in this process alone.
    """
    layout = manifest.compile.layout
    if layout != ONE_RANK:
        raise UserError(
            f"{path}: compiled for {layout}, and {what} runs one rank; compile the model without "
            "--tp and --dp"
        )
