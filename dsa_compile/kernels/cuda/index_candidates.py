"""The best keys of each row without its scores in memory (``src/index_candidates.cu``), exact.

The method is for long prefills. A sample of the keys gives each row a threshold that, most likely,
somewhat more than ``topk`` of its scores reach; only those are written, to lists, and the best
selected from them. Where a row's threshold was too high, or far too low, the scores are computed
once more and written after all: the result is exact either way, only then not fast. The device
decides which of the two happens.
"""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from dsa_compile.kernels.cuda import index_logits
from dsa_compile.kernels.cuda.device import multiprocessors
from dsa_compile.kernels.cuda.launch import CudaKernel, Int64
from dsa_compile.kernels.cuda.topk import topk as select_scores

QUERIES = index_logits.SHARED_QUERIES
SHORT_KEYS = 4096
"""Keys up to which all scores of a row are listed."""
MAX_COLUMNS = 163_840
"""Most columns: with more, the sample would be too small for lists of these capacities."""

_LISTS = 64
_ENTRY_BYTES = 8
_THREADS = 256  # of the selecting kernel
_SHARED_BYTES = 228 * 1024  # of a multiprocessor; a block takes 1 KB more than it asks for
_CUT_BYTES = 17424  # of Shared in index_select.cu without the keys


@dataclass(frozen=True)
class Paged:
    """The operands of :func:`~dsa_compile.kernels.cuda.index_logits.paged_index_logits`."""

    q: Tensor
    weights: Tensor
    cache: Tensor
    block_tables: Tensor
    cu_seqlens: Tensor
    context_lens: Tensor

    @property
    def columns(self) -> int:
        """Keys for which the block tables have room."""
        return self.block_tables.shape[1] * self.cache.shape[1]


@dataclass(frozen=True)
class Sizes:
    """Sizes that go by the number of columns.

    Args:
        sample_bits: logarithm of the keys that are sampled. The smaller the sample, the lower a
            threshold must be to be safe, and the longer the lists.
        capacity: of a list. A row has 64 for each thread block that scores a part of its keys; they
            hold 4,200 to 5,700 scores in the mean, and more by up to a fifth in one row of twenty.
    """

    sample_bits: int
    capacity: int

    def list_bytes(self, rows: int) -> int:
        """Bytes of the lists of so many rows."""
        return _sets(rows) * _LISTS * self.capacity * _ENTRY_BYTES


def sizes_for(columns: int) -> Sizes:
    """Sizes for rows of up to ``columns`` columns."""
    if columns <= 32768:
        return Sizes(9, 144)
    return Sizes(10, 144 if columns <= 65536 else 208)


def memory_bytes(rows: int, columns: int) -> int:
    """Bytes that :func:`candidate_topk` needs: for lists, or else for scores."""
    return max(4 * rows * columns, sizes_for(columns).list_bytes(rows))


def most_rows(columns: int, limit: int) -> int:
    """Rows at a time for which ``limit`` bytes suffice."""
    a_set = _LISTS * sizes_for(columns).capacity * _ENTRY_BYTES
    return max(0, min(limit // (4 * columns), limit // a_set - _sets(0)))


def _sets(rows: int) -> int:
    """Sets of lists: one for each row, and one for each query of each block of the grid."""
    return rows + QUERIES * multiprocessors()


def candidate_topk(x: Paged, topk: int, rows: tuple[int, int], memory: Tensor) -> Tensor:
    """The best keys of some rows.

    Args:
        x: the op's operands, checked; rows of requests that have several.
        topk: a multiple of 4 up to 2,048.
        rows: from first to before last.
        memory: uint8, contiguous, at least :func:`memory_bytes`; written.

    Returns:
        int32 ``[rows, topk]``, physical rows of the cache, then -1.
    """
    begin, end = rows
    count, device = end - begin, x.q.device
    blocks, block_size, _ = x.cache.shape
    requests, table_width = x.block_tables.shape
    shift = block_size.bit_length() - 1
    heads = x.q.shape[1]
    threads = index_logits.warpgroups_for(heads, QUERIES).threads
    grid = (multiprocessors(device), 1, 1)
    integers = functools.partial(torch.empty, dtype=torch.int32, device=device)
    thresholds = torch.empty(count, dtype=torch.float32, device=device)
    counts = torch.empty((_sets(count), _LISTS), dtype=torch.uint8, device=device)
    parts, ends, owners, failed_rows = integers((count, 2)), *(integers(count) for _ in range(3))
    failed, out = integers(1), integers((count, topk))

    query_map = index_logits.query_map(x.q, QUERIES)
    cache = (x.cache, Int64(x.cache.stride(0)), blocks, shift, x.block_tables, table_width)
    work = (x.cu_seqlens, x.context_lens, requests, begin, end, x.q.shape[0])
    sizes = sizes_for(x.columns)
    sample_kernel(heads, sizes.sample_bits)(
        grid, threads, query_map, x.weights, *cache, *work, topk, thresholds, failed
    )
    candidates_kernel(heads, sizes.capacity)(
        grid,
        threads,
        query_map,
        index_logits.page_map(x.cache),
        x.weights,
        *cache,
        *work,
        thresholds,
        topk,
        memory,
        counts,
        parts,
        ends,
        owners,
    )
    select_kernel(sizes.capacity)(
        (count, 1, 1),
        _THREADS,
        memory,
        counts,
        parts,
        ends,
        x.block_tables,
        Int64(x.block_tables.stride(0)),
        owners,
        shift,
        out,
        topk,
        failed_rows,
        failed,
    )
    scores = memory[: 4 * count * x.columns].view(torch.float32).view(count, x.columns)
    index_logits.paged_index_logits(
        x.q,
        x.weights,
        x.cache,
        x.block_tables,
        x.cu_seqlens,
        x.context_lens,
        rows,
        scores,
        wanted=failed,
    )
    return select_scores(
        scores,
        ends,
        topk,
        block_tables=x.block_tables,
        requests=owners,
        block_size=block_size,
        wanted=failed_rows,
        out=out,
    )


@functools.cache
def sample_kernel(heads: int, bits: int) -> CudaKernel:
    """Kernel that finds the thresholds, from two to the power ``bits`` keys."""
    return index_logits.scoring_kernel(
        "index_sample.cu",
        heads,
        QUERIES,
        defines=(("SAMPLE_BITS", bits), ("SHORT_KEYS", SHORT_KEYS)),
        extra_shared=4 * QUERIES * ((1 << bits) + 16),
    )


@functools.cache
def candidates_kernel(heads: int, capacity: int) -> CudaKernel:
    """Kernel that lists the scores that reach the thresholds."""
    return index_logits.scoring_kernel(
        "index_candidates.cu",
        heads,
        QUERIES,
        defines=(
            ("LIST_CAPACITY", capacity),
            ("LIST_QUERIES", QUERIES),
            ("SHORT_KEYS", SHORT_KEYS),
        ),
    )


@functools.cache
def select_kernel(capacity: int) -> CudaKernel:
    """Kernel that selects from the lists, of a capacity that 4 divides."""
    shared = _CUT_BYTES + 4 * capacity * _LISTS
    defines = {
        "THREADS": _THREADS,
        "BLOCKS": _SHARED_BYTES // (shared + 1024),
        "LIST_CAPACITY": capacity,
        "LIST_QUERIES": QUERIES,
        "SHARED_BYTES": shared,
        "PAGED": 1,
    }
    return CudaKernel("index_select.cu", "index_select", defines, shared=shared, overlap=True)
