"""Rows of an FP8 latent cache, gathered and dequantised in one pass."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsa_compile.ops.latent_rows import fp8_rope_dim
from dsa_compile.ops.library import bad_input
from dsa_compile.ops.quantize import BLOCK, E4M3

_ROWS = 8  # of a program: 4.6 KB of FP8, some loads of 16 bytes a thread


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
) -> None:
    """``GROUPS`` blocks of 128 with a scale each, then ``ROPE`` bf16; ``ROW`` bytes in all.

    ``cache``, ``cache_scale`` and ``cache_rope`` are views of one memory in the dtypes of a row's
    parts.
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
    written = (place < count)[:, None]
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
    tl.store(out + to, values.to(tl.bfloat16), (place < count)[:, None] & inside)


def latent_rows_fp8(cache: Tensor, rows: Tensor, rank: int) -> Tensor:
    """``dsa::latent_rows_fp8`` for a rank and a rotary width that are powers of two."""
    rope_dim = fp8_rope_dim(cache, rank)
    if rank & (rank - 1) or rope_dim & (rope_dim - 1) or not cache.is_contiguous():
        raise bad_input("latent_rows_fp8", "on the GPU: a contiguous cache, widths of 2^n")
    width = cache.shape[2]
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
            ROW=width,
            ROWS=_ROWS,
        )
    return out


def latent_rows_fp8_tensor(cache: Tensor, rows: Tensor, scale: Tensor) -> Tensor:
    """``dsa::latent_rows_fp8_tensor``."""
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
        )
    return out
