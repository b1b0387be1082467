"""Reading a large tensor as fast as memory gives it, to know what that is."""

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 8192
"""Whole numbers that a program loads at once: 32 KB, four loads of 16 bytes a thread and more."""
TILES = 4
"""Tiles that a program reads; their loads do not wait for each other."""


@triton.jit
def _sum_tiles(source, sums, tile: tl.constexpr, tiles: tl.constexpr):  # type: ignore[no-untyped-def]
    program = tl.program_id(0)
    at = source + program.to(tl.int64) * (tile * tiles) + tl.arange(0, tile)
    total = tl.zeros((tile,), tl.int32)
    for turn in tl.static_range(tiles):
        total += tl.load(at + turn * tile)
    tl.store(sums + program, tl.sum(total))


def sum_tiles(source: Tensor, sums: Tensor) -> None:
    """Sum every ``TILE * TILES`` numbers.

    Args:
        source: int32 ``[N]``, N a multiple of ``TILE * TILES``.
        sums: int32 ``[N / (TILE * TILES)]``, written; sums wrap around.
    """
    assert source.dtype is torch.int32
    assert source.numel() == sums.numel() * TILE * TILES
    _sum_tiles[(sums.numel(),)](source, sums, TILE, TILES, num_warps=8)
