"""Memory plan: how much of a GPU's memory the caches may take.

The caches take what is left once the weights are there, steps of the largest sizes have been run to
see what they need at their worst, and CUDA graphs have been allowed for.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dsa_compile.artifact.manifest import Manifest
from dsa_compile.errors import OptionValueError
from dsa_compile.ir.region import Region
from dsa_compile.kernels.cuda.shipped import NO_KERNELS, ShippedKernels
from dsa_compile.runtime.execution.batch import Batch, lay_out
from dsa_compile.runtime.execution.devices import device_of
from dsa_compile.runtime.execution.graph_plan import GraphPlan
from dsa_compile.runtime.execution.model_runner import ModelRunner
from dsa_compile.runtime.failures.step_errors import is_out_of_memory, shortage
from dsa_compile.runtime.pages.kinds import GIB, make_caches, page_bytes
from dsa_compile.runtime.sampling.option_rows import OptionRows

# What the driver keeps for an instantiated graph, and what the allocator loses to fragments.
_GRAPH_BYTES = 16 << 20
_SLACK_BYTES = 512 << 20


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of one GPU.

    Attributes:
        total: of the device.
        usable: what may be taken of it.
        resident: weights, the CUDA context, other processes, what sampling keeps.
        step: temporaries of the largest step outside of graphs.
        graphs: of captured steps.
        page: one block in every layer's caches.
        num_blocks: what the rest holds.
        most_blocks: more than so many could not be used; ``num_blocks`` is at most this.
    """

    total: int
    usable: int
    resident: int
    step: int
    graphs: int
    page: int
    num_blocks: int
    most_blocks: int

    @property
    def planned(self) -> int:
        """Bytes that are expected to be taken, at the worst."""
        return self.resident + self.step + self.graphs + self.num_blocks * self.page

    def describe(self, block_size: int) -> str:
        """One line for those who start a server."""
        return (
            f"memory: {self.usable / GIB:.1f} of {self.total / GIB:.1f} GiB; weights and context "
            f"{self.resident / GIB:.1f}, largest step {self.step / GIB:.1f}, graphs "
            f"{self.graphs / GIB:.1f}, caches {self.num_blocks * self.page / GIB:.1f} "
            f"({self.num_blocks:,} blocks, {self.num_blocks * block_size:,} tokens)"
        )


def plan_memory(
    *,
    total: int,
    resident: int,
    step: int,
    graphs: int,
    page: int,
    utilization: float,
    needed_blocks: int,
    most_blocks: int,
) -> MemoryPlan:
    """Divide a GPU's memory.

    Args:
        total: as in :class:`MemoryPlan`, and the next four.
        resident: see there.
        step: see there.
        graphs: see there.
        page: see there.
        utilization: share of ``total`` to use.
        needed_blocks: what the longest request needs.
        most_blocks: as in :class:`MemoryPlan`.

    Raises:
        UserError: the longest request would not fit.
    """
    usable = int(total * utilization)
    rest = usable - resident - step - graphs
    num_blocks = min(max(0, rest) // page, most_blocks)
    plan = MemoryPlan(total, usable, resident, step, graphs, page, num_blocks, most_blocks)
    if num_blocks < needed_blocks:
        raise OptionValueError(
            f"GPU memory: the caches of one request of full length need "
            f"{needed_blocks * page / GIB:.1f} GiB and {max(0, rest) / GIB:.1f} are left of "
            f"{usable / GIB:.1f} usable ({total / GIB:.1f} x {utilization:g}): weights and context "
            f"take {resident / GIB:.1f}, the largest step {step / GIB:.1f}, graphs "
            f"{graphs / GIB:.1f}; lower {{max_model_len}} or {{max_num_batched_tokens}}, raise "
            "{gpu_memory_utilization}, or leave out CUDA graphs, {enforce_eager}"
        )
    return plan


def graph_bytes(count: int, rows: int, vocab_size: int, peak: int) -> int:
    """Device memory that captured steps of one kind take.

    Args:
        count: graphs.
        rows: of the largest.
        vocab_size: width of the fp32 logits they share.
        peak: temporaries of the largest; the graphs share one pool.
    """
    return count * _GRAPH_BYTES + rows * vocab_size * 4 + peak if count else 0


@dataclass(frozen=True)
class StepSizes:
    """The largest steps an engine makes.

    Attributes:
        tokens: of a step.
        rows: requests of a step.
        context: tokens of the longest request.
        each: tokens of a decoding request, drafts included.
    """

    tokens: int
    rows: int
    context: int
    each: int = 1

    @property
    def decoded(self) -> int:
        """Tokens of the largest decode step, each with logits."""
        return self.rows * self.each


def measure_memory(
    manifest: Manifest,
    regions: Mapping[str, Region],
    weights: Mapping[str, Mapping[str, Tensor]],
    sizes: StepSizes,
    graphs: GraphPlan | None,
    utilization: float,
    shipped_kernels: ShippedKernels = NO_KERNELS,
    mixed: GraphPlan | None = None,
) -> MemoryPlan:
    """Run the largest steps over caches that all layers share, and plan for what they took.

    Some temporaries grow with the caches until every row that a step may read has a copy. The
    shared ones are therefore as large as that, or as the real ones could become
    (:func:`blocks_to_measure`).

    Args:
        manifest: of an artifact for a GPU.
        regions: its graphs.
        weights: loaded.
        sizes: the largest steps.
        graphs: to be captured later, or None.
        utilization: share of the memory to use.
        shipped_kernels: what CUDA kernels are loaded from.
        mixed: graphs of steps with prompts, or None.

    Raises:
        UserError: the longest request would not fit, or a step does not.
    """
    spec, size = manifest.model.spec, manifest.block_size
    free, total = torch.cuda.mem_get_info()
    cached = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    free += cached
    needed = -(-sizes.context // size)
    most = sizes.rows * needed
    read = -(-min(sizes.tokens * spec.index_topk, 2**31 - 1) // size)
    largest = blocks_to_measure(
        needed=needed,
        read=read,
        real=min(most, free // page_bytes(manifest)),
        fitting=free // (2 * page_bytes(manifest, shared=True)),
    )
    try:
        step, decode = _measure_steps(manifest, regions, weights, sizes, largest, shipped_kernels)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise OptionValueError(
            f"GPU memory: the largest steps, a prefill of {min(sizes.tokens, sizes.context):,} "
            f"tokens and a decode step of {sizes.rows:,} requests, each at a context of "
            f"{sizes.context:,}, do not fit beside the weights ({(total - free) / GIB:.1f} of "
            f"{total / GIB:.1f} GiB): {{}}; lower {{max_num_batched_tokens}}, {{max_num_seqs}} or "
            "{max_model_len}",
            shortage(error),
        ) from None
    count, with_prompts = (
        0 if plan is None else len(list(plan.graphs())) for plan in (graphs, mixed)
    )
    return plan_memory(
        total=total,
        resident=total - free + OptionRows.nbytes(sizes.rows, spec.vocab_size),
        step=max(step, decode),
        graphs=graph_bytes(count, sizes.decoded, spec.vocab_size, decode)
        + graph_bytes(with_prompts, sizes.rows, spec.vocab_size, step),
        page=page_bytes(manifest),
        utilization=utilization,
        needed_blocks=needed,
        most_blocks=most,
    )


def blocks_to_measure(*, needed: int, read: int, real: int, fitting: int) -> int:
    """Blocks of the caches over which the largest steps are run.

    Attention to FP8 rows copies the whole cache in bf16, or each row that a step reads where these
    are fewer. Larger caches than the engine will have would let it take more than it ever will.

    Args:
        needed: for the longest request.
        read: by a step at most, were every row its own.
        real: that the engine's caches have at most.
        fitting: for which there is room.
    """
    return max(1, min(max(needed, min(read, real)), fitting))


def _measure_steps(
    manifest: Manifest,
    regions: Mapping[str, Region],
    weights: Mapping[str, Mapping[str, Tensor]],
    sizes: StepSizes,
    num_blocks: int,
    shipped_kernels: ShippedKernels,
) -> tuple[int, int]:
    """Memory of the largest prefill and decode steps, over caches of so many blocks."""
    caches = make_caches(manifest, num_blocks, device_of(manifest.target), shared=True)
    runner = ModelRunner(
        manifest,
        regions,
        weights,
        num_blocks,
        sizes.decoded,
        caches=caches,
        shipped_kernels=shipped_kernels,
    )
    prefill = largest_prefill(sizes.tokens, sizes.context, num_blocks, runner.block_size)
    decode = largest_decode(sizes.decoded, sizes.context, num_blocks, runner.block_size)
    return (
        peak_bytes(lambda: runner.forward(prefill)),
        peak_bytes(lambda: runner.forward(decode)),
    )


def peak_bytes(run: Callable[[], object]) -> int:
    """Device memory that a call takes at its worst beyond what is held before it."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    peak: int = torch.cuda.max_memory_allocated() - before
    return peak + _SLACK_BYTES


def largest_prefill(tokens: int, context: int, num_blocks: int, block_size: int) -> Batch:
    """The step that needs the most memory: the last chunk of the longest prompt.

    Args:
        tokens: of the chunk.
        context: the prompt.
        num_blocks: pages there are; the prompt's may be fewer than it needs, and come again.
        block_size: rows of a page.
    """
    tokens = min(tokens, context)
    table = (np.arange(-(-context // block_size)) % num_blocks).astype(np.int32)
    start, count, ids = np.array([context - tokens]), np.array([tokens]), np.zeros(tokens, np.int64)
    return lay_out(ids, start, count, table[None], block_size, np.ones(1, np.int64))


def largest_decode(rows: int, context: int, num_blocks: int, block_size: int) -> Batch:
    """A decode step of the most requests, all of the longest context.

    Args:
        rows: requests.
        context: of each.
        num_blocks: as for :func:`largest_prefill`.
        block_size: rows of a page.
    """
    columns = -(-context // block_size)
    tables = (np.arange(rows * columns) % num_blocks).astype(np.int32).reshape(rows, columns)
    ids, ones = np.zeros(rows, np.int64), np.ones(rows, np.int64)
    return lay_out(ids, ones * (context - 1), ones, tables, block_size, ones, 1)
