"""The lightning indexer over FP8 keys: score every visible key, keep the best.

``score[t, j] = scale[j] * sum_h weights[t, h] * relu(q[t, h] . k[j])`` in fp32: the scale of a
quantised key is positive, so it may as well come after the ReLU, and the scales of the queries and
of the softmax are in the weights already (``index_query_quantize``).
"""

from dataclasses import replace

import torch
from torch import Tensor

from dsa_compile.ops.facts import Family, OpFacts
from dsa_compile.ops.indexer import SELECTION_COST, paged_index_topk
from dsa_compile.ops.library import define

_OP = "paged_index_topk_fp8"
_SCALE_BYTES = 4


def paged_index_topk_fp8(
    q: Tensor,
    weights: Tensor,
    cache: Tensor,
    block_tables: Tensor,
    cu_seqlens: Tensor,
    context_lens: Tensor,
    topk: int,
) -> Tensor:
    """Causal selection over paged FP8 keys, for the requests of one step.

    Row i of a request's n rows stands at position ``context_len - n + i``.

    Args:
        q: e4m3 ``[T, heads, D]``.
        weights: fp32 ``[T, heads]``, with the scales of queries and dot products folded in.
        cache: uint8 ``[num_blocks, block_size, D + 4]``, this step's keys already written. A page
            is ``block_size * D`` bytes of e4m3, then ``block_size`` fp32 scales.
        block_tables: int32 ``[R, M]``, padded with -1.
        cu_seqlens: int32 ``[R + 1]``, first row of each request and the end of the last.
        context_lens: int32 ``[R]``, tokens in the cache including this step's.
        topk: columns of the result.

    Returns:
        int32 ``[T, topk]``: physical cache rows, then -1. Here the best come first and ties go to
        the lower position; other implementations may choose another order, and other rows among
        equal scores at the cut. Rows past ``cu_seqlens[-1]`` and rows before the start of their
        context are all -1.
    """
    if not block_tables.numel():
        return torch.full((q.shape[0], topk), -1, dtype=torch.int32)
    used, compact_tables = block_tables.clamp(min=0).unique(return_inverse=True)
    keys = dequantize_pages(cache.index_select(0, used))
    chosen = paged_index_topk(
        q.float(),
        weights,
        keys,
        compact_tables.int().masked_fill_(block_tables < 0, -1),
        cu_seqlens,
        context_lens,
        topk,
        1.0,
    )
    block_size = cache.shape[1]
    block = chosen.clamp(min=0) // block_size
    offset = chosen - block * block_size
    rows: Tensor = used.take(block.long()).int() * block_size + offset
    return rows.masked_fill_(chosen < 0, -1)


def dequantize_pages(pages: Tensor) -> Tensor:
    """FP8 index keys of pages.

    Args:
        pages: uint8 ``[n, block_size, D + 4]``, contiguous, laid out as above.

    Returns:
        fp32 ``[n, block_size, D]``.
    """
    count, block_size, width = pages.shape
    dim = width - _SCALE_BYTES
    flat = pages.view(count, block_size * width)
    keys = flat[:, : block_size * dim].view(torch.float8_e4m3fn).view(count, block_size, dim)
    scales = flat[:, block_size * dim :].contiguous().view(torch.float32)
    return keys.float() * scales.unsqueeze(-1)


PAGED_INDEX_TOPK_FP8 = define(
    "paged_index_topk_fp8(Tensor q, Tensor weights, Tensor cache, Tensor block_tables,"
    " Tensor cu_seqlens, Tensor context_lens, int topk) -> Tensor",
    paged_index_topk_fp8,
    "(q: e4m3[T, h, D], weights: f32[T, h], cache: u8[P, bs, D + 4], block_tables: i32[R, M],"
    " cu_seqlens: i32[R + 1], context_lens: i32[R]) -> i32[T, topk]",
    OpFacts(Family.INDEX_SELECTION, cost=replace(SELECTION_COST, e4m3_products=True)),
    where=("topk > 0",),
    any_device=False,
)
