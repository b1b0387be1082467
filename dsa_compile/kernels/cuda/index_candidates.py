"""Indexer scores of which only candidates for each row's best are kept (``src/index_candidates*``).

For long contexts: the scores that cannot be among a row's best ``k`` are never written, so that
selecting from the rest reads a small part of what the scores would take.
"""

import torch
from torch import Tensor

from dsa_compile.kernels.cuda import index_logits
from dsa_compile.kernels.cuda.launch import CudaKernel, Int64
from dsa_compile.ops.library import bad_input

CAPACITY = 16384
"""Of a row's list: about what 128K keys in random order list for the best 2,048, times 1.3."""

BYTES_PER_ROW = 8 * CAPACITY
QUERIES = 8  # of a block of the grid, which takes its queries through all their keys


def index_candidates(
    q: Tensor,
    weights: Tensor,
    cache: Tensor,
    block_tables: Tensor,
    cu_seqlens: Tensor,
    context_lens: Tensor,
    topk: int,
    rows: tuple[int, int] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Score each request's last rows, and list what may be among a row's best.

    Args:
        q: as for :func:`~dsa_compile.kernels.cuda.index_logits.paged_index_logits`, and so are the
            others.
        weights: fp32 ``[T, H]``.
        cache: uint8 ``[blocks, block_size, 132]``.
        block_tables: int32 ``[R, M]``.
        cu_seqlens: int32 ``[R + 1]``.
        context_lens: int32 ``[R]``.
        topk: at most 8,192.
        rows: score these only, from first to before last.

    Returns:
        Scores, fp32 ``[rows, CAPACITY]``; the physical rows of their keys, int32, the same shape;
        and how many of each row are there, int32 ``[rows]``. They include all of a row's scores
        that exceed its ``topk``-th best, and as many that equal it as make ``topk``.
    """
    if not 0 < topk <= CAPACITY // 2:
        raise bad_input("index_candidates", f"topk up to {CAPACITY // 2}, not {topk}")
    index_logits.check_paged(q, weights, cache, block_tables, cu_seqlens, context_lens)
    begin, end = rows or (0, q.shape[0])
    blocks, block_size, _ = cache.shape
    requests, table_width = block_tables.shape
    scores = torch.empty((end - begin, CAPACITY), dtype=torch.float32, device=q.device)
    places = torch.empty((end - begin, CAPACITY), dtype=torch.int32, device=q.device)
    counts = torch.zeros(end - begin, dtype=torch.int32, device=q.device)
    if not requests:
        return scores, places, counts
    kernel = candidates_kernel(q.shape[1])
    kernel(
        (index_logits.processors(), 1, 1),
        _GROUPS.threads,
        index_logits.query_map(q, QUERIES),
        index_logits.page_map(cache),
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
        scores,
        places,
        CAPACITY,
        topk,
        counts,
    )
    return scores, places, counts


def candidates_kernel(heads: int) -> CudaKernel:
    """The kernel for a number of index heads."""
    lists = -(-QUERIES * (5 + 256) * 4 // 16) * 16
    scores = _SCORE_STAGES * (QUERIES * (index_logits.TILE + 16) * 4 + 16)
    return index_logits.scoring_kernel(
        "index_candidates.cu",
        "index_candidates",
        heads,
        QUERIES,
        groups=_GROUPS,
        task_readers=3,
        extra_shared=lists + scores,
    )


_GROUPS = index_logits.Warpgroups(math=2, math_registers=216, copy_registers=72)
_SCORE_STAGES = 8
