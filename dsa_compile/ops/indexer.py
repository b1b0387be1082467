"""The lightning indexer: score every visible key, keep the best.

``score[t, j] = sum_h weights[t, h] * relu(scale * q[t, h] . k[j])`` in fp32, for ``j`` up to t's
position. The best ``topk`` come out best first; equal scores go to the lower position.
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dsa_compile.ops.cache import block_rows
from dsa_compile.ops.facts import CostFacts, Family, Form, OpFacts, Sizes
from dsa_compile.ops.library import bad_input, define
from dsa_compile.ops.selection import best_first

SCORE_BYTES = 4 << 20
"""Bound on the temporaries of one chunk of scores. Small enough to stay in cache and off fresh
pages, large enough that a GEMM hides the calls around it. One row's scores over a single long
context may exceed it, and so may the keys of that context."""

# (row, key) pairs that are cheaper to score for nothing than to put into a batch of their own.
_SMALL_BATCH = 1 << 14
_UNREAD = torch.empty(1)  # the addend of a product whose beta is 0


def index_topk(q: Tensor, k: Tensor, weights: Tensor, topk: int, scale: float) -> Tensor:
    """Causal selection inside dense sequences.

    Args:
        q: ``[B, S, heads, D]``; without B it is one sequence, and so are the others.
        k: ``[B, S, D]``, one key head.
        weights: fp32 ``[B, S, heads]``, already times ``heads**-0.5``.
        topk: columns of the result.
        scale: on the dot products, before the ReLU.

    Returns:
        int32 ``[B, S, topk]``: positions, best first, -1 where fewer than ``topk`` are visible.
    """
    if q.dim() == 3:
        return index_topk(q[None], k[None], weights[None], topk, scale)[0]
    batch, length = k.shape[:2]
    out = torch.full((batch, length, topk), -1, dtype=torch.int32)
    positions = torch.arange(length, dtype=torch.int32)
    for b in range(batch if length else 0):
        _select_sequence(q[b], weights[b], k[b], positions, scale, out[b])
    return out


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
    """Causal selection over paged keys, for the requests of one step.

    Row i of a request's n rows stands at position ``context_len - n + i``. Requests with one row
    are scored together, the others one after another.

    Args:
        q: ``[T, heads, D]``.
        weights: fp32 ``[T, heads]``, already times ``heads**-0.5``.
        cache: ``[num_blocks, block_size, D]``, this step's keys already written.
        block_tables: int32 ``[R, M]``, padded with -1.
        cu_seqlens: int32 ``[R + 1]``, first row of each request and the end of the last.
        context_lens: int32 ``[R]``, tokens in the cache including this step's.
        topk: columns of the result.
        scale: on the dot products, before the ReLU.

    Returns:
        int32 ``[T, topk]``: physical cache rows, then -1. Here the best come first; other
        implementations may choose another order, which means nothing to what reads them.
        Rows past ``cu_seqlens[-1]`` and rows before the start of their context are all -1.
    """
    block_size = cache.shape[1]
    lengths = context_lens.numpy()
    if lengths.size and lengths.max() > block_tables.shape[1] * block_size:
        raise bad_input(
            "paged_index_topk",
            f"contexts within their block tables, not {lengths.max()} tokens in "
            f"{block_tables.shape[1]} blocks of {block_size}",
        )
    bounds = cu_seqlens.numpy()
    # rows before the start of a context (a batch captured with empty contexts) see nothing
    counts = np.minimum(bounds[1:] - bounds[:-1], lengths)
    single = (counts == 1).nonzero()[0]
    if single.size and single.size == lengths.size == q.shape[0]:  # pure decode: take all as it is
        return _select_singles(q, weights, cache, block_tables, lengths, topk, scale)

    out = torch.full((q.shape[0], topk), -1, dtype=torch.int32)
    if single.size:
        rows = torch.from_numpy(bounds[single + 1] - 1)
        tables = block_tables.index_select(0, torch.from_numpy(single))
        chosen = _select_singles(
            q.index_select(0, rows),
            weights.index_select(0, rows),
            cache,
            tables,
            lengths[single],
            topk,
            scale,
        )
        out.index_copy_(0, rows.long(), chosen)
    for r in (counts > 1).nonzero()[0].tolist():
        length = int(lengths[r])
        rows_of = slice(int(bounds[r + 1] - counts[r]), int(bounds[r + 1]))
        blocks = -(-length // block_size)
        keys = cache.index_select(0, block_tables[r, :blocks]).flatten(0, 1)[:length]
        slots = block_rows(block_tables[r : r + 1], block_size, blocks)[0, :length]
        _select_sequence(q[rows_of], weights[rows_of], keys, slots, scale, out[rows_of])
    return out


def _select_sequence(
    q: Tensor, weights: Tensor, keys: Tensor, slots: Tensor, scale: float, out: Tensor
) -> None:
    """Select for the last n positions of one sequence.

    Args:
        q: ``[n, heads, D]``.
        weights: fp32 ``[n, heads]``.
        keys: ``[L, D]``.
        slots: int32 ``[L]``, what to report for each position.
        scale: on the dot products.
        out: int32 ``[n, topk]``, filled with -1, written in place.
    """
    count, heads, dim = q.shape
    length = keys.shape[0]
    transposed = keys.float().t()
    everywhere = torch.arange(length)
    step = min(count, max(1, SCORE_BYTES // (length * _bytes_per_key(heads, 0))))
    buffer = torch.empty(step * heads * length)
    for start in range(0, count, step):
        stop = min(start + step, count)
        rows, visible = stop - start, length - count + stop
        logits = buffer[: rows * heads * visible].view(rows * heads, visible)
        queries = q[start:stop].reshape(-1, dim).float()
        logits.addmm_(queries, transposed[:, :visible], beta=0, alpha=scale).relu_()
        scores = torch.bmm(weights[start:stop].unsqueeze(1), logits.view(rows, heads, visible))
        position = everywhere[visible - rows : visible].unsqueeze(1)
        scores = scores.squeeze(1).masked_fill_(everywhere[:visible] > position, float("-inf"))
        best = best_first(scores, out.shape[1])
        chosen = slots.take(best).masked_fill_(best > position, -1)
        out[start:stop, : best.shape[1]] = chosen


def _select_singles(
    q: Tensor,
    weights: Tensor,
    cache: Tensor,
    tables: Tensor,
    lengths: npt.NDArray[np.int32],
    topk: int,
    scale: float,
) -> Tensor:
    """Select for the last position of each of R contexts, none of them empty.

    Args:
        q: ``[R, heads, D]``.
        weights: fp32 ``[R, heads]``.
        cache: ``[num_blocks, block_size, D]``.
        tables: int32 ``[R, M]``.
        lengths: ``[R]``.
        topk: columns of the result.
        scale: on the dot products.

    Returns:
        int32 ``[R, topk]`` physical rows.
    """
    groups = _alike(lengths, _bytes_per_key(q.shape[1], q.shape[2]))
    if len(groups) == 1:
        return _select_batch(q, weights, cache, tables, lengths, topk, scale)
    out = torch.empty((q.shape[0], topk), dtype=torch.int32)
    for group in groups:
        rows = torch.from_numpy(group)
        chosen = _select_batch(
            q.index_select(0, rows),
            weights.index_select(0, rows),
            cache,
            tables.index_select(0, rows),
            lengths[group],
            topk,
            scale,
        )
        out.index_copy_(0, rows, chosen)
    return out


def _select_batch(
    q: Tensor,
    weights: Tensor,
    cache: Tensor,
    tables: Tensor,
    lengths: npt.NDArray[np.int32],
    topk: int,
    scale: float,
) -> Tensor:
    """:func:`_select_singles` in one batch, every row padded to the longest context."""
    block_size = cache.shape[1]
    blocks = -(-int(lengths.max()) // block_size)
    present = tables[:, :blocks].clamp(min=0)
    keys = cache.index_select(0, present.flatten()).view(q.shape[0], -1, cache.shape[2])
    logits = torch.baddbmm(
        _UNREAD, q.float(), keys.float().transpose(1, 2), beta=0, alpha=scale
    ).relu_()
    scores = torch.bmm(weights.unsqueeze(1), logits).squeeze(1)
    ends = torch.from_numpy(lengths).unsqueeze(1)
    # masked after the sums: the rows past a context's end may hold anything, NaN included
    scores.masked_fill_(torch.arange(scores.shape[1], dtype=torch.int32) >= ends, float("-inf"))
    best = best_first(scores, topk)
    slots = block_rows(present, block_size, blocks).gather(1, best).masked_fill_(best >= ends, -1)
    if slots.shape[1] == topk:
        return slots
    return torch.nn.functional.pad(slots, (0, topk - slots.shape[1]), value=-1)


def _alike(lengths: npt.NDArray[np.int32], key_bytes: int) -> list[npt.NDArray[np.int64]]:
    """Split contexts into batches of similar length that respect :data:`SCORE_BYTES`."""
    pairs = int(lengths.max()) * lengths.size
    if pairs * key_bytes <= SCORE_BYTES and pairs - int(lengths.sum()) <= _SMALL_BATCH:
        return [np.arange(lengths.size)]
    order = np.argsort(-lengths, kind="stable")
    ascending = lengths[order[::-1]]
    groups = []
    start = 0
    while start < order.size:
        longest = int(lengths[order[start]])
        stop = min(order.size, start + max(1, SCORE_BYTES // (longest * key_bytes)))
        long = order.size - int(np.searchsorted(ascending, longest // 2, side="right"))
        if (stop - long) * longest > _SMALL_BATCH:
            stop = long
        groups.append(order[start:stop])
        start = stop
    return groups


def _bytes_per_key(heads: int, dim: int) -> int:
    """Temporaries for one (row, key) pair: a gathered fp32 key, its logits, and sorting keys."""
    return 4 * dim + 4 * heads + 32


def _score_products(sizes: Sizes) -> float:
    """A token's queries meet the keys of its own context; the cache has those of all tokens."""
    heads, dim = sizes.shape("q")[-2:]
    pages, block_size, _ = sizes.shape("cache")
    return 2.0 * heads * dim * pages * block_size


SELECTION_COST = CostFacts(launches=2, chain_us=4.0, fills=True, flops=_score_products)

INDEX_TOPK = define(
    "index_topk(Tensor q, Tensor k, Tensor weights, int topk, float scale) -> Tensor",
    index_topk,
    "(q: f[*B, S, h, D], k: q[*B, S, D], weights: f32[*B, S, h]) -> i32[*B, S, topk]",
    OpFacts(Family.INDEX_SELECTION, Form.DENSE),
    where=(
        "len(B) <= 1",
        "topk > 0",
    ),
    any_device=False,
)
PAGED_INDEX_TOPK = define(
    "paged_index_topk(Tensor q, Tensor weights, Tensor cache, Tensor block_tables,"
    " Tensor cu_seqlens, Tensor context_lens, int topk, float scale) -> Tensor",
    paged_index_topk,
    "(q: f[T, h, D], weights: f32[T, h], cache: q[P, bs, D], block_tables: i32[R, M],"
    " cu_seqlens: i32[R + 1], context_lens: i32[R]) -> i32[T, topk]",
    OpFacts(Family.INDEX_SELECTION, cost=SELECTION_COST),
    where=("topk > 0",),
    any_device=False,
)
