"""The indexer's scores over paged keys, in one source for every GPU.

Keys are bf16, fp16 or fp32 rows, or e4m3 pages with a scale a key. A program scores a tile of one
row's keys, ``[keys, heads]`` on the matrix units; a row's keys come from L2 when its neighbours of
the same request have just read them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsa_compile.ops.library import bad_input

_KEYS = 128
_SCAN = 256  # requests at a time
_SCALE_BYTES = 4


@triton.jit(do_not_specialize=["first", "requests", "table_stride", "pages"])
def index_scores_kernel(
    q: tl.tensor,
    weights: tl.tensor,
    cache: tl.tensor,
    key_scales: tl.tensor,
    block_tables: tl.tensor,
    cu_seqlens: tl.tensor,
    context_lens: tl.tensor,
    out: tl.tensor,
    row_ends: tl.tensor,
    owners: tl.tensor,
    first: int,
    requests: int,
    heads: int,
    dim: int,
    table_stride: int,
    block_size: int,
    pages: int,
    page_stride: int,
    scale_stride: int,
    scale_start: int,
    width: int,
    scale: float,
    SCAN: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    KEYS: tl.constexpr,
    FP8: tl.constexpr,
    EXACT: tl.constexpr,
) -> None:
    """``KEYS`` scores of one row; columns that the row does not see are not written."""
    row = tl.program_id(0)
    token = first + row
    # requests that end at or before this token, so the index of its own
    ended = tl.zeros((SCAN,), tl.int32)
    for begin in range(0, requests, SCAN):
        index = begin + tl.arange(0, SCAN)
        bounds = tl.load(cu_seqlens + 1 + index, index < requests, 0x7FFFFFFF)
        ended += (bounds <= token).to(tl.int32)
    request = tl.sum(ended, 0)
    real = request < requests
    end = tl.load(cu_seqlens + 1 + request, real, 0)
    length = tl.load(context_lens + request, real, 0)
    visible = tl.where(real, tl.maximum(length - (end - token) + 1, 0), 0)
    if tl.program_id(1) == 0:
        tl.store(row_ends + row, visible)
        tl.store(owners + row, tl.where(real, request, 0))
    start = tl.program_id(1) * KEYS
    if start >= visible:
        return
    column = start + tl.arange(0, KEYS)
    seen = column < visible
    page = tl.load(
        block_tables + request.to(tl.int64) * table_stride + column // block_size, seen, 0
    ).to(tl.int64)
    held = seen & (page >= 0) & (page < pages)  # what a page elsewhere scores is of no use
    offset = column % block_size
    head = tl.arange(0, HEADS)
    d = tl.arange(0, DIM)
    keys = tl.load(
        cache + (page * page_stride + offset * dim)[:, None] + d[None, :],
        held[:, None] & (d[None, :] < dim),
        0.0,
    )
    queries = tl.load(
        q + (token.to(tl.int64) * heads + head[None, :]) * dim + d[:, None],
        (head[None, :] < heads) & (d[:, None] < dim),
        0.0,
    )
    weight = tl.load(weights + token.to(tl.int64) * heads + head, head < heads, 0.0)
    logits = tl.dot(keys, queries, input_precision="ieee") if EXACT else tl.dot(keys, queries)
    # a key of NaN must be chosen, for the request that it spoils to fail
    relu = tl.maximum(logits, 0.0, propagate_nan=tl.PropagateNan.ALL)
    if FP8:
        scores = tl.sum(relu * weight[None, :], 1)
        scores *= tl.load(key_scales + page * scale_stride + scale_start + offset, held, 0.0)
    else:
        scores = tl.sum(relu * scale * weight[None, :], 1)
    tl.store(out + row.to(tl.int64) * width + column, scores, seen)


def paged_index_scores(
    q: Tensor,
    weights: Tensor,
    cache: Tensor,
    block_tables: Tensor,
    cu_seqlens: Tensor,
    context_lens: Tensor,
    scale: float,
    rows: tuple[int, int],
) -> tuple[Tensor, Tensor, Tensor]:
    """Scores of some rows over the keys that each sees.

    Args:
        q: ``[T, H, D]``, the cache's dtype, or e4m3.
        weights: fp32 ``[T, H]``.
        cache: ``[num_blocks, block_size, D]``, contiguous; for e4m3 queries uint8 ``[num_blocks,
            block_size, D + 4]``, in every page first its keys, then their fp32 scales.
        block_tables: int32 ``[R, M]``.
        cu_seqlens: int32 ``[R + 1]``.
        context_lens: int32 ``[R]``.
        scale: on the dot products, before the ReLU; e4m3 queries have it in their weights.
        rows: first row and the one after the last.

    Returns:
        Scores fp32 ``[rows, W]`` in the column of their position, with W at least
        ``M * block_size``; int32 ``[rows]``, how many leading columns are written; int32
        ``[rows]``, the request of each.

    Raises:
        ValueError: queries and cache do not fit together.
    """
    _, heads, dim = q.shape
    fp8 = q.dtype == torch.float8_e4m3fn
    wanted = (torch.uint8, dim + _SCALE_BYTES) if fp8 else (q.dtype, dim)
    if (cache.dtype, cache.shape[2]) != wanted or not cache.is_contiguous() or dim % 4:
        raise bad_input(
            "paged_index_topk", f"a contiguous cache of {wanted[0]} rows of {wanted[1]}"
        )
    first, stop = rows
    block_size = cache.shape[1]
    width = -(-block_tables.shape[1] * block_size // _KEYS) * _KEYS
    out = torch.empty((stop - first, width), dtype=torch.float32, device=q.device)
    ends = torch.empty(stop - first, dtype=torch.int32, device=q.device)
    owners = torch.empty_like(ends)
    requests = block_tables.shape[0]
    if not requests or not width:
        return out, ends.zero_(), owners.zero_()
    tables = block_tables.contiguous()
    page = block_size * cache.shape[2]
    index_scores_kernel[(stop - first, width // _KEYS)](
        q.contiguous(),
        weights.contiguous(),
        cache.view(q.dtype),
        cache.view(torch.float32) if fp8 else weights,
        tables,
        cu_seqlens.contiguous(),
        context_lens.contiguous(),
        out,
        ends,
        owners,
        first,
        requests,
        heads,
        dim,
        tables.stride(0),
        block_size,
        cache.shape[0],
        page,
        page // 4,
        block_size * dim // 4,
        width,
        scale,
        SCAN=_SCAN,
        HEADS=max(16, triton.next_power_of_2(heads)),
        DIM=max(32, triton.next_power_of_2(dim)),
        KEYS=_KEYS,
        FP8=fp8,
        EXACT=q.dtype == torch.float32,
        num_warps=4,
    )
    return out, ends, owners
