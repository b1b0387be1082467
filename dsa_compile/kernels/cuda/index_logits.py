"""Lightning indexer scores in FP8, on Hopper's tensor cores (``src/index_logits*.cu``).

``score[t, s] = scale[s] * sum_h weights[t, h] * relu(q[t, h] . k[s])``, with products in e4m3 and
sums over heads in fp32. Scores are written for the keys that a row sees, and nowhere else: what
selects from them must look at the row's bounds, never at the rest.
"""

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dsa_compile.kernels.cuda.device import multiprocessors
from dsa_compile.kernels.cuda.launch import CudaKernel, Int64, tensor_map
from dsa_compile.ops.library import bad_input

DIM = 128
TILE = 64
HEADS = (16, 32, 64)
_FEW_REQUESTS, _FEW_KEYS = 8, 163_840
"""Requests below which, and keys of all their tables up to which, a step has little to read."""
SHARED_QUERIES = 8
"""Queries of a block whose warpgroups divide them, and not the keys."""
_SHARED_BYTES = 228 * 1024
"""Shared memory of a multiprocessor; each block takes one KB more than it asks for."""
_COPIERS = 4  # warps that copy; where tiles are divided, a stage is always of the same
_PAGED = "paged_index_topk_fp8"  # the op whose operands the paged kernels take


@dataclass(frozen=True)
class Warpgroups:
    """Warpgroups of a thread block: ``math`` that multiply, and one that copies.

    ``blocks`` of these fit on a multiprocessor.
    """

    math: int
    math_registers: int
    copy_registers: int
    blocks: int = 1

    @property
    def threads(self) -> int:
        """Threads of the block."""
        return 128 * (self.math + 1)


def warpgroups_for(heads: int, queries: int) -> Warpgroups:
    """Warpgroups for which the accumulators and weights of their columns leave registers."""
    columns = heads * queries if queries < SHARED_QUERIES else 256
    if columns <= 64:
        return Warpgroups(2, 96, 48, blocks=2)
    if columns <= 128:
        return Warpgroups(3, 144, 56)
    return Warpgroups(2, 232, 40)


@dataclass(frozen=True)
class Ring:
    """Tiles of keys in flight.

    Args:
        stages: of a block, at most.
        blocks: of a multiprocessor that are launched, at most.
    """

    stages: int = 20
    blocks: int = 2


FEW = Ring(stages=4, blocks=1)
"""Ring for a step with little to read: a block of 51 KB fits beside those of projections that run
on another stream, where one with all of a multiprocessor's memory waits until they have ended."""
MANY = Ring()


def ring_for(requests: int, keys: int) -> Ring:
    """The ring of a decode step.

    Args:
        requests: of the step.
        keys: that the block table of a request holds.
    """
    return FEW if requests < _FEW_REQUESTS and requests * keys <= _FEW_KEYS else MANY


@functools.cache
def scoring_kernel(
    source: str,
    heads: int,
    queries: int,
    ring: Ring = MANY,
    *,
    defines: tuple[tuple[str, int], ...] = (),
    extra_shared: int = 0,
) -> CudaKernel:
    """A kernel of this family; a block has the threads of :func:`warpgroups_for`.

    Args:
        source: file of the kernel, which bears its name and says what becomes of the scores.
        heads: index heads.
        queries: a block keeps at a time: 1, 2, 4 or 8. Eight are divided between the warpgroups;
            with fewer, the warpgroups divide the keys.
        ring: of keys.
        defines: macros of that file.
        extra_shared: bytes of shared memory that it needs beside the family's.
    """
    groups = warpgroups_for(heads, queries)
    fixed = 2 * queries * heads * (DIM + 4) + 16 * 2 + 256
    limit = _SHARED_BYTES // groups.blocks - 1024 - extra_shared
    stages = min((limit - fixed) // (TILE * (DIM + 4) + 16), ring.stages)
    if queries < SHARED_QUERIES:
        stages -= stages % math.lcm(_COPIERS, groups.math)
    return CudaKernel(
        source,
        source.removesuffix(".cu"),
        {
            "HEADS": heads,
            "QUERIES": queries,
            "WARPGROUPS": groups.math,
            "BLOCKS": groups.blocks,
            "SPLIT_KEYS": int(queries < SHARED_QUERIES),
            "KEY_STAGES": stages,
            "MATH_REGISTERS": groups.math_registers,
            "COPY_REGISTERS": groups.copy_registers,
            **dict(defines),
        },
        shared=fixed + stages * (TILE * (DIM + 4) + 16) + extra_shared,
        overlap=True,
    )


def paged_kernel(heads: int, queries: int, ring: Ring = MANY) -> CudaKernel:
    """The kernel that writes the scores of paged keys.

    With the ring for few keys, it asks for them before the kernels in front of it have ended.
    """
    defines = (("PREFETCH", int(ring == FEW)),)
    return scoring_kernel("index_logits_paged.cu", heads, queries, ring, defines=defines)


def paged_index_logits(
    q: Tensor,
    weights: Tensor,
    cache: Tensor,
    block_tables: Tensor,
    cu_seqlens: Tensor,
    context_lens: Tensor,
    rows: tuple[int, int] | None = None,
    out: Tensor | None = None,
    wanted: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Scores of each request's last rows against its keys in the cache, decode and prefill alike.

    Row i of a request's n rows sees the first ``context_len - n + i + 1`` keys.

    Args:
        q: e4m3 ``[T, H, 128]``, H of 16, 32 or 64, contiguous.
        weights: fp32 ``[T, H]``, contiguous.
        cache: uint8 ``[blocks, block_size, 132]``; a page is ``block_size`` keys of 128 bytes, then
            their fp32 scales. Block sizes are powers of two from 4 on.
        block_tables: int32 ``[R, M]``, contiguous.
        cu_seqlens: int32 ``[R + 1]``, first row of each request and the end of the last.
        context_lens: int32 ``[R]``, tokens in the cache including this step's.
        rows: score these only, from first to before last.
        out: fp32, one row each, at least ``M * block_size`` wide; or None.
        wanted: int32 ``[1]``, 0 to write nothing at all; or None.

    Returns:
        The scores, one row for each of ``rows``, in the column of their position; how many leading
        columns of each row are written, int32, 0 for rows of no request; each row's request, int32.
    """
    check_paged(q, weights, cache, block_tables, cu_seqlens, context_lens)
    blocks, block_size, _ = cache.shape
    requests, table_width = block_tables.shape
    begin, end = rows or (0, q.shape[0])
    _takes(0 <= begin <= end <= q.shape[0], f"rows within {q.shape[0]}, not {rows}")
    count, columns = end - begin, table_width * block_size
    if out is not None:
        _check_out(out, count, columns)
    else:
        out = torch.empty((count, columns), dtype=torch.float32, device=q.device)
    ends = torch.empty(count, dtype=torch.int32, device=q.device)
    owners = torch.empty_like(ends)
    if not requests:
        return out, ends.zero_(), owners.zero_()
    heads = q.shape[1]
    queries = queries_per_block(count, requests)
    groups = warpgroups_for(heads, queries)
    ring = ring_for(requests, columns) if groups.blocks > 1 else MANY
    kernel = paged_kernel(heads, queries, ring)
    kernel(
        (min(groups.blocks, ring.blocks) * multiprocessors(q.device), 1, 1),
        groups.threads,
        query_map(q, queries),
        page_map(cache),
        weights,
        cache,
        Int64(cache.stride(0)),
        blocks,
        block_size.bit_length() - 1,
        block_tables,
        table_width,
        cu_seqlens,
        context_lens,
        requests,
        begin,
        end,
        q.shape[0],
        out,
        Int64(out.stride(0)),
        ends,
        owners,
        wanted,
    )
    return out, ends, owners


def queries_per_block(rows: int, requests: int) -> int:
    """Queries that share a pass over their request's keys.

    Their number suits requests with equally many rows; more rows take more passes, and fewer waste
    tensor core time.
    """
    return next((n for n in (1, 2, 4) if rows <= n * requests), SHARED_QUERIES)


def query_map(q: Tensor, queries: int) -> object:
    """Tensor map over ``[T * H, 128]`` queries, as the kernels copy them."""
    rows, heads, _ = q.shape
    return tensor_map(q.view(rows * heads, DIM), (min(queries * heads, 256), DIM))


def page_map(cache: Tensor) -> object:
    """Tensor map over the keys of a cache, ``[blocks, block_size, 128]``."""
    blocks, block_size, _ = cache.shape
    return tensor_map(
        cache,
        (1, min(block_size, TILE), DIM),
        shape=(blocks, block_size, DIM),
        strides=(cache.stride(0), DIM, 1),
    )


def check_paged(
    q: Tensor,
    weights: Tensor,
    cache: Tensor,
    block_tables: Tensor,
    cu_seqlens: Tensor,
    context_lens: Tensor,
) -> None:
    """Refuse operands that the paged kernels would misread."""
    _check_queries(q, weights)
    _, block_size, width = cache.shape
    _takes(
        cache.dtype == torch.uint8 and width == DIM + 4 and cache[0].is_contiguous(),
        "cache as uint8 [blocks, block_size, 132]",
    )
    _takes(
        block_size >= 4 and not block_size & (block_size - 1),
        "block sizes that are powers of two from 4 on",
    )
    _takes(
        not cache.stride(0) % 16 and not cache.data_ptr() % 16,
        "pages at multiples of 16 bytes",
    )
    requests, table_width = block_tables.shape
    for name, tensor, shape in (
        ("block_tables", block_tables, (requests, table_width)),
        ("cu_seqlens", cu_seqlens, (requests + 1,)),
        ("context_lens", context_lens, (requests,)),
    ):
        _takes(
            tensor.dtype == torch.int32 and tensor.shape == shape and tensor.is_contiguous(),
            f"{name} as contiguous int32 {list(shape)}",
        )


def _check_queries(q: Tensor, weights: Tensor) -> None:
    if q.dim() != 3 or q.dtype != torch.float8_e4m3fn or q.shape[2] != DIM:
        raise bad_input(_PAGED, f"q as e4m3 [T, H, 128], not {q.dtype} {list(q.shape)}")
    if q.shape[1] not in HEADS:
        raise bad_input(_PAGED, f"{', '.join(map(str, HEADS))} heads, not {q.shape[1]}")
    shape = list(q.shape[:2])
    if weights.dtype != torch.float32 or list(weights.shape) != shape:
        raise bad_input(_PAGED, f"weights as float32 {shape}, not {list(weights.shape)}")
    if not (q.is_contiguous() and weights.is_contiguous()) or q.data_ptr() % 16:
        raise bad_input(_PAGED, "contiguous q and weights")


def _check_out(out: Tensor, rows: int, columns: int) -> None:
    _takes(
        out.dtype is torch.float32
        and out.shape[0] == rows
        and out.shape[1] >= columns
        and out.stride(1) == 1,
        f"out as float32 [{rows}, {columns} or more], not {out.dtype} {list(out.shape)}",
    )


def _takes(condition: bool, what: str) -> None:
    if not condition:
        raise bad_input(_PAGED, what)
