"""``dsa::paged_index_topk`` and its FP8 form for every GPU: Triton's scores, then their top-k."""

import torch
from torch import Tensor

from dsa_compile.kernels.cuda.topk import topk as select
from dsa_compile.kernels.triton.index_scores import paged_index_scores

SCORE_BYTES = 512 << 20
"""Bound on the scores held at once: rows are taken in chunks."""


def paged_index_topk(
    q: Tensor,
    weights: Tensor,
    cache: Tensor,
    block_tables: Tensor,
    cu_seqlens: Tensor,
    context_lens: Tensor,
    topk: int,
    scale: float,
) -> Tensor:
    """``dsa::paged_index_topk``; a row's cache rows come in no order of score.

    Rows are taken in chunks so that their scores stay within :data:`SCORE_BYTES`.
    """
    tokens, block_size = q.shape[0], cache.shape[1]
    if not block_tables.numel():  # no request: every row is padding
        return torch.full((tokens, topk), -1, dtype=torch.int32, device=q.device)
    step = max(1, SCORE_BYTES // (4 * block_tables.shape[1] * block_size))
    chunks = []
    for first in range(0, tokens, step):
        rows = (first, min(first + step, tokens))
        scores, ends, owners = paged_index_scores(
            q, weights, cache, block_tables, cu_seqlens, context_lens, scale, rows
        )
        chunks.append(
            select(
                scores,
                ends,
                topk,
                block_tables=block_tables,
                requests=owners,
                block_size=block_size,
            )
        )
    if not chunks:
        return torch.empty((0, topk), dtype=torch.int32, device=q.device)
    return chunks[0] if len(chunks) == 1 else torch.cat(chunks)


def paged_index_topk_fp8(
    q: Tensor,
    weights: Tensor,
    cache: Tensor,
    block_tables: Tensor,
    cu_seqlens: Tensor,
    context_lens: Tensor,
    topk: int,
) -> Tensor:
    """``dsa::paged_index_topk_fp8``; see :func:`paged_index_topk`."""
    return paged_index_topk(q, weights, cache, block_tables, cu_seqlens, context_lens, topk, 1.0)
