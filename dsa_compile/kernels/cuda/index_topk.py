"""``dsa::paged_index_topk_fp8`` on Hopper: scores, then the best of each row as physical rows."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dsa_compile.kernels.cuda import index_candidates, index_logits
from dsa_compile.kernels.cuda.index_candidates import Paged
from dsa_compile.kernels.cuda.topk import topk as select

SCORE_BYTES = 512 << 20
"""Bound on the working memory: scores, or lists of candidates. Further rows are taken in further
passes; their number goes by shapes, so that it is the same in every replay of a CUDA graph."""
LISTED_ROWS = 1024
LISTED_COLUMNS = 32_768
"""Least rows and columns for which listing candidates is faster than writing the scores."""


def paged_index_topk_fp8(
    q: Tensor,
    weights: Tensor,
    cache: Tensor,
    block_tables: Tensor,
    cu_seqlens: Tensor,
    context_lens: Tensor,
    topk: int,
) -> Tensor:
    """``dsa::paged_index_topk_fp8``: equal bits in every run, the lower position of equal scores.

    The kernel takes 16, 32 or 64 heads of 128, pages of a power of two of keys from 4 on, and what
    :func:`~dsa_compile.kernels.cuda.topk.topk` takes of ``topk``.
    """
    x = Paged(q, weights, cache, block_tables, cu_seqlens, context_lens)
    return candidate_topk(x, topk) if prefers_lists(x) else score_topk(x, topk)


def candidate_topk(x: Paged, topk: int) -> Tensor:
    """Top-k by lists of candidates (:mod:`~dsa_compile.kernels.cuda.index_candidates`)."""
    step = min(x.q.shape[0], index_candidates.most_rows(x.columns, SCORE_BYTES))
    size = index_candidates.memory_bytes(step, x.columns)
    return _in_passes(index_candidates.candidate_topk, x, topk, step, size)


def score_topk(x: Paged, topk: int) -> Tensor:
    """Top-k with all scores in memory."""
    step = min(x.q.shape[0], max(1, SCORE_BYTES // max(1, 4 * x.columns)))
    return _in_passes(_score_topk, x, topk, step, 4 * step * x.columns)


def prefers_lists(x: Paged) -> bool:
    """Whether to keep only candidates of the scores; a matter of shapes."""
    rows, requests = x.q.shape[0], x.block_tables.shape[0]
    shared = index_logits.queries_per_block(rows, requests) == index_logits.SHARED_QUERIES
    long = LISTED_COLUMNS <= x.columns <= index_candidates.MAX_COLUMNS
    most = index_candidates.most_rows(x.columns, SCORE_BYTES) if shared and long else 0
    return min(rows, most) >= LISTED_ROWS


def _in_passes(
    best: Callable[[Paged, int, tuple[int, int], Tensor], Tensor],
    x: Paged,
    topk: int,
    step: int,
    size: int,
) -> Tensor:
    rows = x.q.shape[0]
    if not rows or not x.columns:
        return torch.full((rows, topk), -1, dtype=torch.int32, device=x.q.device)
    memory = torch.empty(size, dtype=torch.uint8, device=x.q.device)
    starts: Sequence[int] = range(0, rows, step)
    if x.q.is_meta and len(starts) > 2:
        # a rehearsal, whose result nobody takes: those between launch what the first does
        starts = (0, starts[-1])
    parts = [best(x, topk, (first, min(first + step, rows)), memory) for first in starts]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _score_topk(x: Paged, topk: int, rows: tuple[int, int], memory: Tensor) -> Tensor:
    count = rows[1] - rows[0]
    scores = memory[: 4 * count * x.columns].view(torch.float32).view(count, x.columns)
    _, ends, owners = index_logits.paged_index_logits(
        x.q, x.weights, x.cache, x.block_tables, x.cu_seqlens, x.context_lens, rows, scores
    )
    return select(
        scores,
        ends,
        topk,
        block_tables=x.block_tables,
        requests=owners,
        block_size=x.cache.shape[1],
    )
