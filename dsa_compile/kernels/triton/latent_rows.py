"""Rows of an FP8 latent cache, gathered and dequantised in one pass."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsa_compile.ops.fused_cache import fp8_row_bytes
from dsa_compile.ops.library import bad_input
from dsa_compile.ops.quantize import BLOCK, E4M3, block_count

_ROWS = 8  # of a program at a time: 4.6 KB of FP8, some loads of 16 bytes a thread
_PROGRAMS = 2112  # of a launch whose rows the device counts


@triton.jit(do_not_specialize=["most", "cache_rows"])
def _blocks_kernel(
    cache: tl.tensor,
    cache_scale: tl.tensor,
    cache_rope: tl.tensor,
    rows: tl.tensor,
    out: tl.tensor,
    counted: tl.tensor,
    most: int,
    cache_rows: int,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    ROPE: tl.constexpr,
    ROW: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """``GROUPS`` of ``GROUP`` values with a scale each, then ``ROPE`` bf16; ``ROW`` bytes in all.

    ``cache``, ``cache_scale`` and ``cache_rope`` are views of one memory in the dtypes of a row's
    parts. ``counted`` is how many of the ``most`` rows there are, or None for all.
    """
    RANK: tl.constexpr = GROUPS * GROUP
    count = most if counted is None else tl.load(counted)
    start = tl.program_id(0) * ROWS
    while start < count:
        place = start + tl.arange(0, ROWS)
        row = tl.load(rows + place, place < count, -1).to(tl.int64)
        kept = (row >= 0) & (row < cache_rows)
        to = place.to(tl.int64) * (RANK + ROPE)
        group = tl.arange(0, GROUPS)
        column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        tile = cache + row[:, None, None] * ROW + column[None]
        values = tl.load(tile, kept[:, None, None], 0.0)
        at = row[:, None] * (ROW // 4) + RANK // 4 + group[None, :]
        scale = tl.load(cache_scale + at, kept[:, None], 0.0)
        latent = (values.to(tl.float32) * scale[:, :, None]).to(tl.bfloat16)
        written = (place < count)[:, None]
        tl.store(out + to[:, None, None] + column[None], latent, written[:, :, None])
        rope = tl.arange(0, ROPE)[None, :]
        at = row[:, None] * (ROW // 2) + (RANK + 4 * GROUPS) // 2 + rope
        turned = tl.load(cache_rope + at, kept[:, None], 0.0)
        tl.store(out + to[:, None] + RANK + rope, turned, written)
        start += tl.num_programs(0) * ROWS


@triton.jit(do_not_specialize=["most", "cache_rows"])
def _tensor_kernel(
    cache: tl.tensor,
    scale: tl.tensor,
    rows: tl.tensor,
    out: tl.tensor,
    counted: tl.tensor,
    most: int,
    cache_rows: int,
    width: int,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """``width`` e4m3 under one scale; ``WIDTH`` is the next power of two."""
    count = most if counted is None else tl.load(counted)
    column = tl.arange(0, WIDTH)[None, :]
    inside = column < width
    start = tl.program_id(0) * ROWS
    while start < count:
        place = start + tl.arange(0, ROWS)
        row = tl.load(rows + place, place < count, -1).to(tl.int64)
        kept = (row >= 0) & (row < cache_rows)
        values = tl.load(cache + row[:, None] * width + column, kept[:, None] & inside, 0.0)
        values = values.to(tl.float32) * tl.load(scale)
        to = place.to(tl.int64)[:, None] * width + column
        tl.store(out + to, values.to(tl.bfloat16), (place < count)[:, None] & inside)
        start += tl.num_programs(0) * ROWS


def latent_rows(
    cache: Tensor,
    rows: Tensor,
    rank: int,
    cache_scale: Tensor | None = None,
    *,
    count: Tensor | None = None,
) -> Tensor:
    """Rows under a scale for all of the cache if one is given, else in the ``fp8`` format."""
    if cache_scale is not None:
        return latent_rows_fp8_tensor(cache, rows, cache_scale, count=count)
    return latent_rows_fp8(cache, rows, rank, count=count)


def latent_rows_fp8(
    cache: Tensor, rows: Tensor, rank: int, *, count: Tensor | None = None
) -> Tensor:
    """Rows in the ``fp8`` format, for a rank and a rotary width that are powers of two.

    Args:
        cache: uint8 ``[num_blocks, block_size, fp8_row_bytes(R, dr)]``, contiguous.
        rows: int32 or int64 ``[N]``, physical rows; a negative one gives zeros.
        rank: R.
        count: int32 ``[1]``, how many of the rows there are; beyond, nothing is written. None: all.

    Returns:
        bf16 ``[N, R + dr]``.

    Raises:
        ValueError: the cache is none of that format.
    """
    rope_dim = (cache.shape[2] - fp8_row_bytes(rank, 0)) // 2
    if rank & (rank - 1) or rope_dim & (rope_dim - 1) or not cache.is_contiguous():
        raise bad_input(
            "paged_latent_attention_fp8", "on the GPU: a contiguous cache, widths of 2^n"
        )
    out = cache.new_empty((rows.shape[0], rank + rope_dim), dtype=torch.bfloat16)
    if out.shape[0]:
        _blocks_kernel[_grid(rows, count)](
            cache.view(E4M3),
            cache.view(torch.float32),
            cache.view(torch.bfloat16),
            rows,
            out,
            count,
            rows.shape[0],
            cache.shape[0] * cache.shape[1],
            GROUPS=block_count(rank),
            GROUP=min(rank, BLOCK),
            ROPE=rope_dim,
            ROW=cache.shape[2],
            ROWS=_ROWS,
        )
    return out


def latent_rows_fp8_tensor(
    cache: Tensor, rows: Tensor, scale: Tensor, *, count: Tensor | None = None
) -> Tensor:
    """Rows of e4m3 under one static scale.

    Args:
        cache: e4m3, or the same bytes as uint8, ``[num_blocks, block_size, R + dr]``, contiguous.
        rows: int32 or int64 ``[N]``, physical rows; a negative one gives zeros.
        scale: fp32 ``[1]``; a value is ``q * scale``.
        count: as for :func:`latent_rows_fp8`.

    Returns:
        bf16 ``[N, R + dr]``.

    Raises:
        ValueError: another cache, or several scales.
    """
    if not cache.is_contiguous() or cache.dtype not in (E4M3, torch.uint8) or scale.numel() != 1:
        raise bad_input(
            "paged_latent_attention_fp8_tensor", "a contiguous e4m3 or uint8 cache and one scale"
        )
    width = cache.shape[2]
    out = cache.new_empty((rows.shape[0], width), dtype=torch.bfloat16)
    if out.shape[0]:
        _tensor_kernel[_grid(rows, count)](
            cache.view(E4M3),
            scale,
            rows,
            out,
            count,
            rows.shape[0],
            cache.shape[0] * cache.shape[1],
            width,
            WIDTH=triton.next_power_of_2(width),
            ROWS=_ROWS,
        )
    return out


def _grid(rows: Tensor, count: Tensor | None) -> tuple[int]:
    programs: int = triton.cdiv(rows.shape[0], _ROWS)
    return (programs if count is None else min(programs, _PROGRAMS),)
