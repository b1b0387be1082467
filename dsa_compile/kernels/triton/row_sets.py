"""Rows of a cache that the slots of a step name, numbered without asking the host.

Tokens of a prefill name the same rows over and over, few of a large cache. The rows are collected
in a bitmap of the cache, 32 rows a word, and numbered word by word, so that work and memory go by
the rows that are named, and by the cache's size only with the bitmap's 0.3 bytes a row.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

_SLOTS = 1024  # of a program
_WORDS = 1024
_ALIGNED = 4  # words of 16 bytes
# Every so manieth run of slots is marked before the rest. That leaves little unmarked, so that the
# rest hardly writes; all at once would write each row as often as tokens name it.
_STEPS = (512, 32, 1)


@dataclass(frozen=True)
class RowSet:
    """The rows that slots name.

    Attributes:
        rows: int32 ``[N]`` with N the most there can be; the first ``count`` are the rows, each
            once, in no particular order, the rest is not written.
        count: int32 ``[1]``.
        places: int32 ``[T, K]``, for each slot the place of its row in ``rows``; -1 for none.
    """

    rows: Tensor
    count: Tensor
    places: Tensor


@triton.jit
def _bits(word: tl.tensor) -> tl.tensor:
    """Count of the bits of an int32 that are set."""
    x = word.to(tl.uint32, bitcast=True)
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return ((x * 0x01010101) >> 24).to(tl.int32)


@triton.jit(do_not_specialize=["count", "cache_rows", "step"])
def _mark_kernel(
    slots: tl.tensor,
    words: tl.tensor,
    count: int,
    cache_rows: int,
    step: int,
    SLOTS: tl.constexpr,
) -> None:
    """Set the bits of every ``step``-th run of slots that name rows."""
    place = tl.program_id(0).to(tl.int64) * step * SLOTS + tl.arange(0, SLOTS)
    slot = tl.load(slots + place, place < count, -1)
    named = (slot >= 0) & (slot < cache_rows)
    at = words + (slot >> 5)
    bit = 1 << (slot & 31)
    # L1 may hold a word from before others set its bits: then one more sets them
    unset = (tl.load(at, named, -1) & bit) == 0
    tl.atomic_or(at, bit, named & unset, sem="relaxed")


@triton.jit(do_not_specialize=["count"])
def _number_kernel(
    words: tl.tensor,
    bases: tl.tensor,
    rows: tl.tensor,
    total: tl.tensor,
    count: int,
    WORDS: tl.constexpr,
) -> None:
    """Numbers for the marked rows: ``bases`` of each word's first, and the row of each number."""
    at = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    word = tl.load(words + at, at < count, 0)
    mine = _bits(word)
    here = tl.sum(mine, 0)
    if here > 0:
        base = tl.atomic_add(total, here, sem="relaxed") + tl.cumsum(mine, 0) - mine
        tl.store(bases + at, base, at < count)
        for bit in range(32):
            marked = ((word >> bit) & 1) != 0
            tl.store(rows + base, at * 32 + bit, marked)
            base += marked.to(tl.int32)


@triton.jit(do_not_specialize=["count", "cache_rows"])
def _place_kernel(
    slots: tl.tensor,
    words: tl.tensor,
    bases: tl.tensor,
    places: tl.tensor,
    count: int,
    cache_rows: int,
    SLOTS: tl.constexpr,
) -> None:
    """The number of each slot's row, or -1."""
    place = tl.program_id(0).to(tl.int64) * SLOTS + tl.arange(0, SLOTS)
    slot = tl.load(slots + place, place < count, -1)
    named = (slot >= 0) & (slot < cache_rows)
    before = tl.load(words + (slot >> 5), named, 0) & ((1 << (slot & 31)) - 1)
    number = tl.load(bases + (slot >> 5), named, 0) + _bits(before)
    tl.store(places + place, tl.where(named, number, -1), place < count)


def distinct_rows(slots: Tensor, cache_rows: int) -> RowSet:
    """The rows that slots name, each once.

    Args:
        slots: int32 ``[T, K]``; what names no row of the cache is left out.
        cache_rows: of the cache.
    """
    slots = slots.contiguous()
    size, device = slots.numel(), slots.device
    count = triton.cdiv(cache_rows, 32)
    # the number of rows, then the words; both aligned alike whatever the size of the cache, or
    # Triton would compile for one size what it has compiled for another
    zeros = torch.zeros(_ALIGNED + count, dtype=torch.int32, device=device)
    total, words = zeros[:1], zeros[_ALIGNED:]
    bases = torch.empty(count, dtype=torch.int32, device=device)
    rows = torch.empty(min(size, cache_rows), dtype=torch.int32, device=device)
    places = torch.empty_like(slots)
    blocks = triton.cdiv(size, _SLOTS)
    if blocks:
        for step in _STEPS:
            _mark_kernel[(triton.cdiv(blocks, step),)](
                slots, words, size, cache_rows, step, SLOTS=_SLOTS
            )
        _number_kernel[(triton.cdiv(count, _WORDS),)](
            words, bases, rows, total, count, WORDS=_WORDS
        )
        _place_kernel[(blocks,)](slots, words, bases, places, size, cache_rows, SLOTS=_SLOTS)
    return RowSet(rows, total, places)
