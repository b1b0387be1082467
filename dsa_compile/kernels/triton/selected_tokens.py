"""Bits that say which tokens of a step each of its tokens has selected.

Selections are slots, the physical rows of a cache. Where all keys are tokens of the step, as in one
of whole prompts, attention by heads wants to know which tokens they are: a row of bits a query,
which a tile of queries and keys reads a word at a time.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

_SLOTS = 1024  # of a turn
_WORDS = 4  # a row is a multiple of 16 bytes
_BYTES = 64 << 20  # of bits at a time: 16,384 tokens need 32 MiB


@triton.jit(do_not_specialize=["tokens", "cache_rows"])
def _place_kernel(
    slot_mapping: tl.tensor, places: tl.tensor, tokens: int, cache_rows: int, SLOTS: tl.constexpr
) -> None:
    """Write the place of every token into the entry of its slot."""
    token = tl.program_id(0) * SLOTS + tl.arange(0, SLOTS)
    slot = tl.load(slot_mapping + token, token < tokens, -1)
    tl.store(places + slot, token, (slot >= 0) & (slot < cache_rows))


@triton.jit(do_not_specialize=["begin", "tokens", "cache_rows", "count", "words"])
def _mark_kernel(
    slots: tl.tensor,
    slot_mapping: tl.tensor,
    positions: tl.tensor,
    places: tl.tensor,
    bits: tl.tensor,
    begin: int,
    tokens: int,
    cache_rows: int,
    count: int,
    slots_stride: int,
    words: int,
    SLOTS: tl.constexpr,
) -> None:
    """Set the bits of what one token has selected.

    Entries of ``places`` that no token wrote hold anything: an entry counts if the token that it
    names has that slot.
    """
    row = tl.program_id(0)
    token = begin + row
    first = token - tl.load(positions + token).to(tl.int32)
    for start in range(0, count, SLOTS):
        at = start + tl.arange(0, SLOTS)
        slot = tl.load(slots + token.to(tl.int64) * slots_stride + at, at < count, -1)
        place = tl.load(places + slot, (slot >= 0) & (slot < cache_rows), -1)
        # of its own request, up to itself: first is no less than 0, except of padding
        place = tl.where((place >= tl.maximum(first, 0)) & (place <= token), place, -1)
        seen = tl.load(slot_mapping + place, place >= 0, -1) == slot
        to = bits + row.to(tl.int64) * words + place // 32
        tl.atomic_or(to, 1 << (place & 31), seen & (place >= 0), sem="relaxed")


class SelectedTokens:
    """Selections of a step's tokens among themselves.

    Args:
        slots: int32 ``[T, K]``, last dimension contiguous; what is outside of the cache, no token
            of the step, of another request or behind the token does not count.
        slot_mapping: int64 ``[T]``, -1 for padding.
        positions: int64 ``[T]``, of each token in its request, whose tokens here begin at 0.
        cache_rows: of the cache.
    """

    def __init__(
        self, slots: Tensor, slot_mapping: Tensor, positions: Tensor, cache_rows: int
    ) -> None:
        self._slots = slots
        self._batch = slot_mapping, positions
        self._cache_rows = cache_rows
        self.tokens = len(slot_mapping)
        self._places = torch.empty(cache_rows, dtype=torch.int32, device=slots.device)
        if self.tokens:
            _place_kernel[(triton.cdiv(self.tokens, _SLOTS),)](
                slot_mapping, self._places, self.tokens, cache_rows, SLOTS=_SLOTS
            )

    def parts(self, queries: int) -> Iterator[tuple[int, int, Tensor]]:
        """Stretches of tokens whose bits fit into 64 MiB: the first, behind the last, and bits.

        Args:
            queries: of a tile; every stretch but the last is a multiple.
        """
        fitting = _BYTES // (4 * max(1, _words(self.tokens)))
        step = max(1, fitting // queries) * queries
        for start in range(0, self.tokens, step):
            stop = min(start + step, self.tokens)
            yield start, stop, self.bits(start, stop)

    def bits(self, start: int, stop: int) -> Tensor:
        """The selections of some tokens.

        Args:
            start: the first of them.
            stop: behind the last.

        Returns:
            int32 ``[stop - start, words]`` of bits for the tokens up to ``stop``; bit ``j % 32`` of
            word ``j // 32`` is set if token ``j`` is selected.
        """
        words = _words(stop)
        bits = torch.zeros((stop - start, words), dtype=torch.int32, device=self._slots.device)
        if stop > start:
            _mark_kernel[(stop - start,)](
                self._slots,
                *self._batch,
                self._places,
                bits,
                start,
                stop,
                self._cache_rows,
                self._slots.shape[1],
                self._slots.stride(0),
                words,
                SLOTS=_SLOTS,
            )
        return bits


def _words(stop: int) -> int:
    """Words of a row of bits of the tokens up to one."""
    return -(-stop // (32 * _WORDS)) * _WORDS
