"""Rows of an FP8 latent cache, gathered and dequantised in one pass."""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsa_compile.ops.latent_rows import fp8_rope_dim
from dsa_compile.ops.library import bad_input
from dsa_compile.ops.quantize import BLOCK, E4M3

_ROWS = 8  # of a program: 4.6 KB of FP8, some loads of 16 bytes a thread
_SLOTS = 1024


@triton.jit
def _blocks_kernel(
    cache: tl.tensor,
    cache_scale: tl.tensor,
    cache_rope: tl.tensor,
    rows: tl.tensor,
    out: tl.tensor,
    count: int,
    cache_rows: int,
    GROUPS: tl.constexpr,
    ROPE: tl.constexpr,
    ROW: tl.constexpr,
    ROWS: tl.constexpr,
    SPARSE: tl.constexpr,
) -> None:
    """``GROUPS`` blocks of 128 with a scale each, then ``ROPE`` bf16; ``ROW`` bytes in all.

    ``cache``, ``cache_scale`` and ``cache_rope`` are views of one memory in the dtypes of a row's
    parts. If ``SPARSE``, what a negative row would give is not written.
    """
    RANK: tl.constexpr = GROUPS * 128
    place = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row = tl.load(rows + place, place < count, -1).to(tl.int64)
    kept = (row >= 0) & (row < cache_rows)
    to = place.to(tl.int64) * (RANK + ROPE)
    group = tl.arange(0, GROUPS)
    column = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    kept_tile = kept[:, None, None]
    values = tl.load(cache + row[:, None, None] * ROW + column[None], kept_tile, 0.0)
    at = row[:, None] * (ROW // 4) + RANK // 4 + group[None, :]
    scale = tl.load(cache_scale + at, kept[:, None], 0.0)
    latent = values.to(tl.float32) * scale[:, :, None]
    written = (kept if SPARSE else place < count)[:, None]
    tl.store(out + to[:, None, None] + column[None], latent.to(tl.bfloat16), written[:, :, None])
    rope = tl.arange(0, ROPE)[None, :]
    at = row[:, None] * (ROW // 2) + (RANK + 4 * GROUPS) // 2 + rope
    tl.store(out + to[:, None] + RANK + rope, tl.load(cache_rope + at, kept[:, None], 0.0), written)


@triton.jit
def _tensor_kernel(
    cache: tl.tensor,
    scale: tl.tensor,
    rows: tl.tensor,
    out: tl.tensor,
    count: int,
    cache_rows: int,
    width: int,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    SPARSE: tl.constexpr,
) -> None:
    """``width`` e4m3 under one scale; ``WIDTH`` is the next power of two."""
    place = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row = tl.load(rows + place, place < count, -1).to(tl.int64)
    kept = (row >= 0) & (row < cache_rows)
    column = tl.arange(0, WIDTH)[None, :]
    inside = column < width
    values = tl.load(cache + row[:, None] * width + column, kept[:, None] & inside, 0.0)
    values = values.to(tl.float32) * tl.load(scale)
    to = place.to(tl.int64)[:, None] * width + column
    written = kept if SPARSE else place < count
    tl.store(out + to, values.to(tl.bfloat16), written[:, None] & inside)


@triton.jit
def _mark_kernel(
    slots: tl.tensor, rows: tl.tensor, count: int, cache_rows: int, SLOTS: tl.constexpr
) -> None:
    """``rows[slot] = slot``; the same value whoever writes it, if it does not find it already."""
    place = tl.program_id(0).to(tl.int64) * SLOTS + tl.arange(0, SLOTS)
    slot = tl.load(slots + place, place < count, -1)
    named = (slot >= 0) & (slot < cache_rows)
    # most slots name rows that are marked: a read, even of an old value in L1, saves a store
    tl.store(rows + slot, slot, named & (tl.load(rows + slot, named) != slot))


def latent_rows_fp8(cache: Tensor, rows: Tensor, rank: int, *, sparse: bool = False) -> Tensor:
    """``dsa::latent_rows_fp8`` for a rank and a rotary width that are powers of two.

    Args:
        cache: as the op's.
        rows: as the op's.
        rank: as the op's.
        sparse: leave the memory of absent rows as it is, rather than write zeros.
    """
    rope_dim = fp8_rope_dim(cache, rank)
    if rank & (rank - 1) or rope_dim & (rope_dim - 1) or not cache.is_contiguous():
        raise bad_input("latent_rows_fp8", "on the GPU: a contiguous cache, widths of 2^n")
    out = cache.new_empty((rows.shape[0], rank + rope_dim), dtype=torch.bfloat16)
    if out.shape[0]:
        _blocks_kernel[(triton.cdiv(rows.shape[0], _ROWS),)](
            cache.view(E4M3),
            cache.view(torch.float32),
            cache.view(torch.bfloat16),
            rows,
            out,
            rows.shape[0],
            cache.shape[0] * cache.shape[1],
            GROUPS=rank // BLOCK,
            ROPE=rope_dim,
            ROW=cache.shape[2],
            ROWS=_ROWS,
            SPARSE=sparse,
        )
    return out


def latent_rows_fp8_tensor(
    cache: Tensor, rows: Tensor, scale: Tensor, *, sparse: bool = False
) -> Tensor:
    """``dsa::latent_rows_fp8_tensor``; ``sparse`` as for :func:`latent_rows_fp8`."""
    if not cache.is_contiguous() or cache.dtype not in (E4M3, torch.uint8) or scale.numel() != 1:
        raise bad_input("latent_rows_fp8_tensor", "a contiguous e4m3 or uint8 cache and one scale")
    width = cache.shape[2]
    out = cache.new_empty((rows.shape[0], width), dtype=torch.bfloat16)
    if out.shape[0]:
        _tensor_kernel[(triton.cdiv(rows.shape[0], _ROWS),)](
            cache.view(E4M3),
            scale,
            rows,
            out,
            rows.shape[0],
            cache.shape[0] * cache.shape[1],
            width,
            WIDTH=triton.next_power_of_2(width),
            ROWS=_ROWS,
            SPARSE=sparse,
        )
    return out


def bf16_rows(
    dequantize: Callable[[Tensor, bool], Tensor], slots: Tensor, cache_rows: int
) -> tuple[Tensor, Tensor]:
    """The rows that slots name in bf16, and slots that name them there.

    Few slots are gathered one by one. If there are more of them than the cache has rows, every row
    is dequantised once and keeps its number; rows that nobody names are neither read nor written.

    Args:
        dequantize: rows int32 ``[N]`` and ``sparse`` to bf16 ``[N, width]``, one of the functions
            above on its cache.
        slots: int32 ``[T, K]``; -1 names none.
        cache_rows: of the cache.

    Returns:
        A cache bf16 ``[1, N, width]`` with N the lesser of ``T * K`` and ``cache_rows``, and int32
        ``[T, K]``.
    """
    if slots.numel() <= cache_rows:
        places = torch.arange(slots.numel(), dtype=torch.int32, device=slots.device)
        absent = (slots < 0) | (slots >= cache_rows)
        picked = dequantize(slots.flatten(), False)
        return picked.unsqueeze(0), places.view(slots.shape).masked_fill_(absent, -1)
    slots = slots.contiguous()
    rows = torch.full((cache_rows,), -1, dtype=torch.int32, device=slots.device)
    _mark_kernel[(triton.cdiv(slots.numel(), _SLOTS),)](
        slots, rows, slots.numel(), cache_rows, SLOTS=_SLOTS
    )
    return dequantize(rows, True).unsqueeze(0), slots
