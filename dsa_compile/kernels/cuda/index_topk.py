"""``dsa::paged_index_topk_fp8`` on Hopper: scores, then the best of each row as physical rows."""

import torch
from torch import Tensor

from dsa_compile.kernels.cuda.index_logits import paged_index_logits
from dsa_compile.kernels.cuda.topk import topk as select

SCORE_BYTES = 512 << 20
"""Bound on the scores held at a time. Further rows are taken in further passes; their number goes
by the width of the block table, so that it is the same in every replay of a CUDA graph."""


def paged_index_topk_fp8(
    q: Tensor,
    weights: Tensor,
    cache: Tensor,
    block_tables: Tensor,
    cu_seqlens: Tensor,
    context_lens: Tensor,
    topk: int,
) -> Tensor:
    """As ``ops.index_fp8``; the same bits in every run, of equal scores the lower position.

    Takes 16, 32 or 64 heads of 128, pages of a power of two of keys from 4 on, and what
    :func:`~dsa_compile.kernels.cuda.topk.topk` takes of ``topk``.
    """
    rows = q.shape[0]
    block_size = cache.shape[1]
    columns = block_tables.shape[1] * block_size
    if not rows or not columns:
        return torch.full((rows, topk), -1, dtype=torch.int32, device=q.device)
    step = min(rows, max(1, SCORE_BYTES // (4 * columns)))
    scores = torch.empty((step, columns), dtype=torch.float32, device=q.device)
    parts = []
    for first in range(0, rows, step):
        last = min(first + step, rows)
        window, ends, owners = paged_index_logits(
            q,
            weights,
            cache,
            block_tables,
            cu_seqlens,
            context_lens,
            (first, last),
            scores[: last - first],
        )
        parts.append(
            select(
                window,
                ends,
                topk,
                block_tables=block_tables,
                requests=owners,
                block_size=block_size,
            )
        )
    return parts[0] if len(parts) == 1 else torch.cat(parts)
