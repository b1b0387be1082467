"""Rows of work of the experts: sorting the router's choice, finding a tile's expert, adding up.

A (token, slot) pair is one row. Rows are the pairs in order of their expert, equal ones in order of
the pair; ``starts[e]`` is expert e's first row and ``starts[E]`` the number of rows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_SORT_BLOCK = 1024
_COMBINE_BLOCK = 1024


@triton.jit(do_not_specialize=["pairs"])
def sort_kernel(
    indices: tl.tensor,
    starts: tl.tensor,
    pair_of: tl.tensor,
    pairs: int,
    experts: int,
    BLOCK: tl.constexpr,
) -> None:
    """One program an expert, and one more for the end: it counts what comes before its rows."""
    expert = tl.program_id(0)
    offsets = tl.arange(0, BLOCK)
    before = tl.zeros((BLOCK,), tl.int32)
    # a loop of any length, not of a constant one: the number of pairs builds no other kernel
    for i in range(tl.cdiv(pairs, BLOCK)):
        pair = i * BLOCK + offsets
        index = tl.load(indices + pair, pair < pairs, -1)
        before += ((index >= 0) & (index < expert)).to(tl.int32)
    row = tl.sum(before, 0)
    tl.store(starts + expert, row)
    if expert < experts:
        for i in range(tl.cdiv(pairs, BLOCK)):
            pair = i * BLOCK + offsets
            mine = (tl.load(indices + pair, pair < pairs, -1) == expert).to(tl.int32)
            place = row + tl.cumsum(mine, 0) - mine
            tl.store(pair_of + place, pair, mine != 0)
            row += tl.sum(mine, 0)


@triton.jit
def tile_rows(
    tile: tl.tensor,
    starts: tl.tensor,
    experts: int,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """A tile's expert, first row and end. Tiles hold up to ROWS rows of one expert.

    Beyond the last tile the expert is not less than ``experts``.
    """
    expert = tl.arange(0, EXPERTS)
    start = tl.load(starts + expert, expert < experts, 0)
    end = tl.load(starts + expert + 1, expert < experts, 0)
    tiles = (end - start + ROWS - 1) // ROWS
    ends = tl.cumsum(tiles, 0)
    mine = tl.sum((ends <= tile).to(tl.int32), 0)
    is_mine = expert == mine
    first_tile = tl.sum(tl.where(is_mine, ends - tiles, 0), 0)
    first = tl.sum(tl.where(is_mine, start, 0), 0) + (tile - first_tile) * ROWS
    return mine, first, tl.sum(tl.where(is_mine, end, 0), 0)


@triton.jit
def combine_kernel(
    outputs: tl.tensor,
    weights: tl.tensor,
    indices: tl.tensor,
    out: tl.tensor,
    width: int,
    experts: int,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Weighted sum of a token's rows in fp32, in order of the slots; absent experts are skipped."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.zeros((BLOCK,), tl.float32)
    for slot in tl.static_range(TOP_K):
        pair = token * TOP_K + slot
        index = tl.load(indices + pair)
        if (index >= 0) & (index < experts):
            value = tl.load(outputs + pair * width + column, inside, 0.0).to(tl.float32)
            total += tl.load(weights + pair) * value
    tl.store(out + token * width + column, total.to(out.dtype.element_ty), inside)


def sort_pairs(indices: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Rows of a choice.

    Args:
        indices: int64 or int32 ``[N, k]``, contiguous; pairs outside ``[0, E)`` get no row.
        experts: E.

    Returns:
        starts int32 ``[E + 1]`` and pair_of int32 ``[N * k]``, whose elements from ``starts[E]`` on
        are not written.
    """
    pairs = indices.numel()
    starts = torch.empty(experts + 1, dtype=torch.int32, device=indices.device)
    pair_of = torch.empty(pairs, dtype=torch.int32, device=indices.device)
    block = min(max(triton.next_power_of_2(pairs), 32), _SORT_BLOCK)
    sort_kernel[(experts + 1,)](indices, starts, pair_of, pairs, experts, BLOCK=block, num_warps=4)
    return starts, pair_of


def tiles_most(pairs: int, experts: int, rows: int) -> int:
    """Most tiles that there can be, whatever was chosen."""
    return min(pairs, experts) + pairs // rows


def combine(outputs: Tensor, weights: Tensor, indices: Tensor, experts: int, out: Tensor) -> None:
    """``out[t] = sum over s of weights[t, s] * outputs[t * k + s]``, in fp32.

    Args:
        outputs: ``[N * k, H]``; rows of absent experts may hold anything.
        weights: fp32 ``[N, k]``.
        indices: ``[N, k]``; a slot outside ``[0, experts)`` is skipped.
        experts: E.
        out: ``[N, H]``, written.
    """
    tokens, width = out.shape
    combine_kernel[(tokens, triton.cdiv(width, _COMBINE_BLOCK))](
        outputs,
        weights,
        indices,
        out,
        width,
        experts,
        TOP_K=indices.shape[1],
        BLOCK=_COMBINE_BLOCK,
        num_warps=4,
    )
