"""Rows of the latent cache: copied, or made from the raw projection in one kernel."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsa_compile.kernels.triton.e4m3 import block_scale, reciprocal, saturate
from dsa_compile.kernels.triton.rope import deinterleave
from dsa_compile.kernels.triton.rows import as_rows
from dsa_compile.ops.fused_cache import fp8_row_bytes
from dsa_compile.ops.library import bad_input
from dsa_compile.ops.quantize import BLOCK, E4M3, block_count

FP8, FP8_TENSOR = (tl.constexpr(i) for i in range(2))
"""Row formats, see :mod:`dsa_compile.ops.fused_cache`."""


@triton.jit(do_not_specialize=["tokens", "cache_rows"])
def norm_rope_write_kernel(
    kv: tl.tensor,
    weight: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    slots: tl.tensor,
    static_scale: tl.tensor,
    cache: tl.tensor,
    cache_scale: tl.tensor,
    cache_rope: tl.tensor,
    tokens: int,
    cache_rows: int,
    eps: float,
    kv_stride: int,
    table_stride: int,
    FORMAT: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    UE8M0: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    HALF: tl.constexpr,
    ROW: tl.constexpr,
    TOKENS: tl.constexpr,
) -> None:
    """``TOKENS`` rows: norm of ``GROUPS * GROUP`` values, rotation of ``2 HALF``, stores.

    ``cache``, ``cache_scale`` and ``cache_rope`` are views of one memory in the dtypes of a row's
    parts; ``ROW`` is its length in elements of ``cache``.
    """
    RANK: tl.constexpr = GROUPS * GROUP
    dtype = kv.dtype.element_ty
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    slot = tl.load(slots + token, token < tokens, -1).to(tl.int64)
    kept = (slot >= 0) & (slot < cache_rows)
    start = token.to(tl.int64) * kv_stride

    group = tl.arange(0, GROUPS)
    column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    wide = tl.load(kv + start[:, None, None] + column[None], kept[:, None, None], 0.0)
    wide = wide.to(tl.float32)
    gain = tl.load(weight + column).to(tl.float32)[None]

    half = tl.arange(0, HALF)[None, :]
    table = token.to(tl.int64)[:, None] * table_stride + half
    c = tl.load(cos + table, kept[:, None], 0.0).to(tl.float32)
    s = tl.load(sin + table, kept[:, None], 0.0).to(tl.float32)
    rope = kv + start[:, None] + RANK
    if INTERLEAVED:
        pairs = tl.load(rope + tl.arange(0, 2 * HALF)[None, :], kept[:, None], 0.0)
        first, second = deinterleave(pairs, TOKENS, HALF)
    else:
        first = tl.load(rope + half, kept[:, None], 0.0)
        second = tl.load(rope + HALF + half, kept[:, None], 0.0)
    first, second = first.to(tl.float32), second.to(tl.float32)
    low = (first * c - second * s).to(dtype)
    high = (second * c + first * s).to(dtype)

    mean = tl.sum(tl.sum(wide * wide, 2), 1) / RANK
    normed = (wide * tl.rsqrt(mean + eps)[:, None, None] * gain).to(dtype)
    out = cache + slot[:, None, None] * ROW + column[None]
    kept_tile = kept[:, None, None]
    if FORMAT == FP8:
        values = normed.to(tl.float32)
        scales = block_scale(tl.max(tl.abs(values), 2), UE8M0)
        tl.store(out, (values * reciprocal(scales)[:, :, None]).to(tl.float8e4nv), kept_tile)
        at = slot[:, None] * (ROW // 4) + RANK // 4 + group[None, :]
        tl.store(cache_scale + at, scales, kept[:, None])
        rope_out = cache_rope + slot[:, None] * (ROW // 2) + (RANK + 4 * GROUPS) // 2 + half
    else:
        rope_out = cache + slot[:, None] * ROW + RANK + half
        inverse = reciprocal(tl.load(static_scale + tl.arange(0, 1)))
        tl.store(out, saturate(normed.to(tl.float32) * inverse[:, None, None]), kept_tile)
        low = saturate(low.to(tl.float32) * inverse[:, None])
        high = saturate(high.to(tl.float32) * inverse[:, None])
    tl.store(rope_out, low.to(cache_rope.dtype.element_ty), kept[:, None])
    tl.store(rope_out + HALF, high.to(cache_rope.dtype.element_ty), kept[:, None])


@triton.jit(do_not_specialize=["cache_rows"])
def copy_rows_kernel(
    left: tl.tensor,
    right: tl.tensor,
    slots: tl.tensor,
    cache: tl.tensor,
    cache_rows: int,
    left_width: int,
    right_width: int,
    left_stride: int,
    right_stride: int,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
) -> None:
    """One row of the cache from the rows of one or two tensors."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    if (slot >= 0) & (slot < cache_rows):
        out = cache + slot * (left_width + right_width)
        column = tl.arange(0, LEFT)
        values = tl.load(left + token * left_stride + column, column < left_width)
        tl.store(out + column, values, column < left_width)
        if RIGHT > 0:
            column = tl.arange(0, RIGHT)
            values = tl.load(right + token * right_stride + column, column < right_width)
            tl.store(out + left_width + column, values, column < right_width)


def norm_rope_write_latent_cache_fp8(
    kv: Tensor,
    weight: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    ue8m0: bool,
    cache: Tensor,
    slot_mapping: Tensor,
) -> None:
    """``dsa::norm_rope_write_latent_cache_fp8`` for a rank of 16, 32, 64, …."""
    name = "norm_rope_write_latent_cache_fp8"
    views = (cache.view(E4M3), cache.view(torch.float32), cache.view(torch.bfloat16))
    rank = weight.shape[0]
    width = fp8_row_bytes(rank, kv.shape[1] - rank)
    _launch(
        name, FP8, width, kv, weight, eps, cos, sin, interleaved, slot_mapping, views, ue8m0=ue8m0
    )


def norm_rope_write_latent_cache_fp8_tensor(
    kv: Tensor,
    weight: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    scale: Tensor,
    cache: Tensor,
    slot_mapping: Tensor,
) -> None:
    """``dsa::norm_rope_write_latent_cache_fp8_tensor`` for a rank of 16, 32, 64, …."""
    name = "norm_rope_write_latent_cache_fp8_tensor"
    views = (cache.view(E4M3),) * 3
    width = kv.shape[1]
    _launch(
        name,
        FP8_TENSOR,
        width,
        kv,
        weight,
        eps,
        cos,
        sin,
        interleaved,
        slot_mapping,
        views,
        static_scale=scale,
    )


def _launch(
    op: str,
    row_format: tl.constexpr,
    row_width: int,
    kv: Tensor,
    weight: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    slot_mapping: Tensor,
    views: tuple[Tensor, Tensor, Tensor],
    *,
    ue8m0: bool = False,
    static_scale: Tensor | None = None,
) -> None:
    cache, rank, rope_dim = views[0], weight.shape[0], cos.shape[-1]
    if not cache.is_contiguous():
        raise bad_input(op, "a cache whose pages lie side by side (contiguous)")
    rows, cos, sin = as_rows(kv), as_rows(cos), as_rows(sin)
    if cos.stride(0) != sin.stride(0):
        cos, sin = cos.contiguous(), sin.contiguous()
    tokens = 2 if rows.shape[0] > 256 else 1
    norm_rope_write_kernel[(triton.cdiv(rows.shape[0], tokens),)](
        rows,
        weight.contiguous(),
        cos,
        sin,
        slot_mapping.contiguous(),
        cos if static_scale is None else static_scale,
        *views,
        rows.shape[0],
        cache.shape[0] * cache.shape[1],
        eps,
        rows.stride(0),
        cos.stride(0),
        FORMAT=row_format,
        INTERLEAVED=interleaved,
        UE8M0=ue8m0,
        GROUPS=block_count(rank),
        GROUP=min(rank, BLOCK),
        HALF=rope_dim // 2,
        ROW=row_width,
        TOKENS=tokens,
        num_warps=2,
    )


def write_latent_cache(ckv: Tensor, k_pe: Tensor, cache: Tensor, slot_mapping: Tensor) -> None:
    """``dsa::write_latent_cache``."""
    _copy("write_latent_cache", as_rows(ckv), as_rows(k_pe), cache, slot_mapping)


def write_index_cache(k: Tensor, cache: Tensor, slot_mapping: Tensor) -> None:
    """``dsa::write_index_cache``."""
    rows = as_rows(k)
    _copy("write_index_cache", rows, rows[:, :0], cache, slot_mapping)


def _copy(op: str, left: Tensor, right: Tensor, cache: Tensor, slot_mapping: Tensor) -> None:
    if not cache.is_contiguous():
        raise bad_input(op, "a cache whose pages lie side by side (contiguous)")
    copy_rows_kernel[(left.shape[0],)](
        left,
        right,
        slot_mapping.contiguous(),
        cache,
        cache.shape[0] * cache.shape[1],
        left.shape[1],
        right.shape[1],
        left.stride(0),
        right.stride(0),
        LEFT=triton.next_power_of_2(left.shape[1]),
        RIGHT=triton.next_power_of_2(right.shape[1]) if right.shape[1] else 0,
        num_warps=2,
    )
