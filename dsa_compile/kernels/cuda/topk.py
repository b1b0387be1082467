"""Top-k of every row of scores: which columns hold the largest.

Rows that fit one thread block are held in its registers (``topk_rows.cu``); for longer ones the
blocks of a cluster filter out all but a few thousand scores (``topk_filter.cu``). Either way a
score is read from memory once, the result is exact, and it is the same bits in every run.
"""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from dsa_compile.kernels.cuda.launch import CudaKernel, Int64
from dsa_compile.ops.library import bad_input

MAX_K = 2048
MAX_ROWS = 1 << 27
MAX_WIDTH = 1 << 20
"""Widest row: longer ones would still be right, but slow, as their sample is too small."""
_SELECT_BYTES = 34088  # of Shared in topk_recount.cuh without what the blocks send


@dataclass(frozen=True)
class Rows:
    """Parameters that ``topk_rows.cu`` is compiled with: see there.

    Args:
        threads: of a block, one for each row.
        groups: of four scores, at most, held by a thread.
        blocks: on a multiprocessor.
        sample_step: every how many groups one score is sampled.
    """

    threads: int
    groups: int
    blocks: int
    sample_step: int = 2

    @property
    def width(self) -> int:
        """Scores of the longest row, its first one aligned to 16 bytes."""
        return 4 * self.groups * self.threads


@dataclass(frozen=True)
class Filter:
    """Parameters that ``topk_filter.cu`` is compiled with: see there.

    Args:
        threads: of a block.
        cluster: blocks for each row.
        batch: groups of four scores that a thread loads together.
        blocks: on a multiprocessor.
        capacity: candidates.
        sample_lanes: neighbouring threads that sample side by side, a power of two.
    """

    threads: int
    cluster: int
    batch: int
    blocks: int
    capacity: int = 8192
    sample_lanes: int = 1


_CHOICES: tuple[tuple[int, int, Rows | Filter], ...] = (  # up to so many rows, of such a width
    (32, 4096, Rows(256, 4, 4)),
    (132, 4096, Rows(512, 2, 1)),
    (264, 4096, Rows(256, 4, 1)),
    (MAX_ROWS, 4096, Rows(256, 4, 4)),
    (8, 8192, Rows(512, 4, 2)),
    (132, 8192, Rows(512, 4, 1)),
    (132, 10240, Rows(512, 5, 1)),
    (132, 16384, Rows(512, 8, 1)),
    (264, 8192, Rows(256, 8, 2)),
    (MAX_ROWS, 8192, Rows(256, 8, 4)),
    (MAX_ROWS, 10240, Rows(256, 10, 2)),
    (MAX_ROWS, 16384, Rows(256, 16, 2, sample_step=4)),
    (16, 65536, Filter(512, 4, 4, 1)),
    (8, MAX_WIDTH + 3, Filter(512, 8, 4, 1)),
    (16, MAX_WIDTH + 3, Filter(512, 4, 4, 1)),
    (66, MAX_WIDTH + 3, Filter(512, 2, 4, 1)),
    (MAX_ROWS, MAX_WIDTH + 3, Filter(512, 1, 2, 2)),
)
"""The first that fits is taken: latency where the GPU is not full, else throughput."""


def topk(
    scores: Tensor,
    ends: Tensor,
    k: int,
    *,
    starts: Tensor | None = None,
    max_length: int | None = None,
    block_tables: Tensor | None = None,
    requests: Tensor | None = None,
    block_size: int = 1,
    wanted: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Columns of each row's largest scores, or where their keys are cached.

    A NaN exceeds every number, -0.0 equals +0.0, and of equal scores the lower column is taken. A
    row of at most ``k`` scores is not read.

    Args:
        scores: fp32 ``[T, W]``, W at most :data:`MAX_WIDTH`; rows may be further apart than W.
            Only the columns from a row's start to its end are used.
        ends: int32 ``[T]``, end of each row's columns; at or before the start for an empty row.
        k: a multiple of 4 up to 2048.
        starts: int32 ``[T]``, first column of each row, or None for zeros.
        max_length: bound on ``ends - starts`` that the caller knows, or None for W. Longer rows are
            cut to it.
        block_tables: int32 ``[R, M]``, pages of each request, or None for columns as the result.
            Rows are cut to the ``M * block_size`` columns that these hold.
        requests: int32 ``[T]``, the row of ``block_tables`` for each row, or None for T = R.
        block_size: keys of a page, a power of two.
        wanted: int32 ``[T]``, 0 for rows whose results are left as they are, or None for all rows.
        out: int32 ``[T, k]``, contiguous, to write to, or None.

    Returns:
        int32 ``[T, k]``: columns counted from the row's start; with block tables the physical row
        ``page * block_size + offset``, or -1 where the page is. Then -1. Their order depends on the
        scores and shapes alone; it is ascending by column where rows fit one thread block.

    Raises:
        ValueError: what was given does not fit this description.
    """
    _check(scores, ends, k, starts, block_tables, requests, block_size, wanted)
    rows, width = scores.shape
    if out is None:
        out = torch.empty((rows, k), dtype=torch.int32, device=scores.device)
    elif out.dtype is not torch.int32 or out.shape != (rows, k) or not out.is_contiguous():
        raise bad_input(
            "topk", f"out as contiguous int32 {[rows, k]}, not {out.dtype} {list(out.shape)}"
        )
    longest = width if max_length is None else min(width, max_length)
    table_stride = 0
    if block_tables is not None:
        longest = min(longest, block_tables.shape[1] * block_size)
        table_stride = block_tables.stride(0)
    aligned = starts is None and scores.stride(0) % 4 == 0 and scores.data_ptr() % 16 == 0
    chosen = plan(rows, longest + (0 if aligned else 3))
    cluster = chosen.cluster if isinstance(chosen, Filter) else 1
    _kernel(chosen, block_tables is not None)(
        (rows * cluster, 1, 1),
        chosen.threads,
        scores,
        Int64(scores.stride(0)),
        width,
        starts,
        ends,
        block_tables,
        Int64(table_stride),
        requests,
        block_size.bit_length() - 1,
        longest,
        wanted,
        out,
        k,
    )
    return out


@functools.cache
def plan(rows: int, width: int) -> Rows | Filter:
    """The kernel for a number of rows and a width, as measured on an H200.

    Args:
        rows: of the scores.
        width: of the longest row, and three more if rows may start anywhere.
    """
    return next(variant for most, widest, variant in _CHOICES if rows <= most and width <= widest)


def widths() -> tuple[int, ...]:
    """Widths up to which :func:`plan` chooses alike for one number of rows, ascending."""
    return tuple(sorted({widest for _, widest, _ in _CHOICES}))


def variants() -> tuple[Rows | Filter, ...]:
    """All kernels that :func:`plan` may choose."""
    return tuple(dict.fromkeys(variant for _, _, variant in _CHOICES))


def compile_options(variant: Rows | Filter, *, paged: bool) -> tuple[str, dict[str, int], int]:
    """Options that a kernel is compiled and launched with.

    Args:
        variant: which one.
        paged: report physical rows.

    Returns:
        The source file, its macros, and the bytes of dynamic shared memory at launch.
    """
    defines = {"THREADS": variant.threads, "BLOCKS": variant.blocks, "PAGED": int(paged)}
    if isinstance(variant, Rows):
        defines |= {"GROUPS": variant.groups, "SAMPLE_STEP": variant.sample_step}
        return "topk_rows.cu", defines, 0
    shared = _SELECT_BYTES + 8 * (variant.cluster + variant.capacity)
    defines |= {
        "CLUSTER": variant.cluster,
        "BATCH": variant.batch,
        "CAPACITY": variant.capacity,
        "SAMPLE_LANES": variant.sample_lanes,
        "SHARED_BYTES": shared,
    }
    return "topk_filter.cu", defines, shared


@functools.cache
def _kernel(variant: Rows | Filter, paged: bool) -> CudaKernel:
    source, defines, shared = compile_options(variant, paged=paged)
    cluster = variant.cluster if isinstance(variant, Filter) else 1
    return CudaKernel(
        source,
        source.removesuffix(".cu"),
        defines,
        shared=shared,
        cluster=(cluster, 1, 1),
        overlap=True,
    )


def _check(
    scores: Tensor,
    ends: Tensor,
    k: int,
    starts: Tensor | None,
    block_tables: Tensor | None,
    requests: Tensor | None,
    block_size: int,
    wanted: Tensor | None,
) -> None:
    if scores.dtype is not torch.float32 or scores.dim() != 2 or scores.stride(1) != 1:
        raise bad_input(
            "topk",
            "scores as float32 [T, W] with contiguous rows, not "
            f"{scores.dtype} {list(scores.shape)} of strides {list(scores.stride())}",
        )
    rows, width = scores.shape
    if width > MAX_WIDTH:
        raise bad_input("topk", f"rows of at most {MAX_WIDTH:,} scores, not {width:,}")
    if not 4 <= k <= MAX_K or k % 4:
        raise bad_input("topk", f"k as a multiple of 4 up to {MAX_K}, not {k}")
    for name, tensor, shape in (
        ("ends", ends, [rows]),
        ("starts", starts, [rows]),
        ("requests", requests, [rows]),
        ("wanted", wanted, [rows]),
    ):
        if tensor is not None and (
            tensor.dtype is not torch.int32
            or list(tensor.shape) != shape
            or not tensor.is_contiguous()
            or tensor.device != scores.device
        ):
            raise bad_input(
                "topk",
                f"{name} as contiguous int32 {shape} on {scores.device}, not "
                f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}",
            )
    if block_size < 1 or block_size & (block_size - 1):
        raise bad_input("topk", f"block_size as a power of two, not {block_size}")
    if block_tables is None:
        return
    if (
        block_tables.dtype is not torch.int32
        or block_tables.dim() != 2
        or block_tables.stride(1) != 1
        or block_tables.device != scores.device
        or (requests is None and block_tables.shape[0] != rows)
    ):
        raise bad_input(
            "topk",
            f"block_tables as int32 [R, M] on {scores.device}, with R = {rows} unless requests are "
            f"given, not {block_tables.dtype} {list(block_tables.shape)} on {block_tables.device}",
        )
