"""The indexer's FP8 keys, from the raw projection into pages, in one kernel."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsa_compile.kernels.triton.hadamard import (
    TILE,
    common_scale,
    rotate,
    store_tiles,
    transform,
)
from dsa_compile.kernels.triton.rows import as_rows
from dsa_compile.ops.index_fused import SCALE_BYTES
from dsa_compile.ops.library import bad_input
from dsa_compile.ops.quantize import E4M3

DIM, ROPE_DIM = 128, 64
ROWS, WARPS = 16, 4
"""Keys of a program, the fewest that a product on the tensor cores takes, and its warps."""


@triton.jit(do_not_specialize=["tokens", "cache_rows"])
def write_index_key_kernel(
    k: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    slots: tl.tensor,
    cache: tl.tensor,
    cache_scale: tl.tensor,
    tokens: int,
    cache_rows: int,
    block_size: int,
    eps: float,
    k_stride: int,
    table_stride: int,
    INTERLEAVED: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """``ROWS`` keys. ``cache`` and ``cache_scale`` are views of one memory, e4m3 and fp32."""
    DIM: tl.constexpr = 4 * TILE
    dtype = k.dtype.element_ty
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    slot = tl.load(slots + token, token < tokens, -1)
    kept = (slot >= 0) & (slot < cache_rows)
    slot = tl.where(kept, slot, 0).to(tl.int32)  # cheaper to divide
    valid = kept[:, None]
    column = tl.arange(0, TILE)[None, :]
    start = k + (token.to(tl.int64) * k_stride)[:, None] + column
    a = tl.load(start, valid, 0.0).to(tl.float32)
    b = tl.load(start + TILE, valid, 0.0).to(tl.float32)
    c = tl.load(start + 2 * TILE, valid, 0.0).to(tl.float32)
    d = tl.load(start + 3 * TILE, valid, 0.0).to(tl.float32)

    mean = (tl.sum(a + b + c + d, 1) / DIM)[:, None]
    a, b, c, d = a - mean, b - mean, c - mean, d - mean
    inverse = tl.rsqrt(tl.sum(a * a + b * b + c * c + d * d, 1) / DIM + eps)[:, None]
    a = _affine(a * inverse, weight + column, bias + column, dtype)
    b = _affine(b * inverse, weight + TILE + column, bias + TILE + column, dtype)
    c = _affine(c * inverse, weight + 2 * TILE + column, bias + 2 * TILE + column, dtype)
    d = _affine(d * inverse, weight + 3 * TILE + column, bias + 3 * TILE + column, dtype)

    table = (token.to(tl.int64) * table_stride)[:, None]
    a, b = rotate(
        a.to(tl.float32), b.to(tl.float32), cos + table, sin + table, valid, ROWS, INTERLEAVED
    )
    a, b, c, d = transform(a.to(dtype), b.to(dtype), c, d, dtype)
    scales = common_scale(a, b, c, d)

    # a page: all its keys, then all its scales
    page = (slot // block_size * block_size).to(tl.int64)
    offset = (slot % block_size).to(tl.int64)
    target = page * (DIM + 4) + offset * DIM
    store_tiles(cache + target[:, None], a, b, c, d, scales, valid)
    tl.store(cache_scale + page * (TILE + 1) + block_size * TILE + offset, scales, kept)


@triton.jit
def _affine(x: tl.tensor, weight: tl.tensor, bias: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    return (x * tl.load(weight).to(tl.float32) + tl.load(bias).to(tl.float32)).to(dtype)


def write_index_key_fp8(
    k: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    cache: Tensor,
    slot_mapping: Tensor,
) -> None:
    """``dsa::write_index_key_fp8`` for 16-bit keys of 128, of which 64 are rotated."""
    name = "write_index_key_fp8"
    if k.dim() != 2 or k.shape[1] != DIM or k.element_size() != 2 or cos.shape[-1] != ROPE_DIM:
        raise bad_input(
            name,
            f"k [T, {DIM}] of 16 bits and tables [T, {ROPE_DIM}], not {list(k.shape)} {k.dtype} "
            f"and {list(cos.shape)}",
        )
    if weight.shape != (DIM,) or bias.shape != (DIM,):
        raise bad_input(name, f"weight and bias [{DIM}]")
    if (
        cache.dtype is not torch.uint8
        or cache.shape[2] != DIM + SCALE_BYTES
        or not cache.is_contiguous()
    ):
        raise bad_input(
            name,
            f"cache uint8 [num_blocks, block_size, {DIM + SCALE_BYTES}], contiguous, not "
            f"{cache.dtype} {list(cache.shape)}",
        )
    rows, cos, sin = as_rows(k), as_rows(cos), as_rows(sin)
    if cos.stride(0) != sin.stride(0):
        cos, sin = cos.contiguous(), sin.contiguous()
    tokens = rows.shape[0]
    write_index_key_kernel[(triton.cdiv(tokens, ROWS),)](
        rows,
        weight.contiguous(),
        bias.contiguous(),
        cos,
        sin,
        slot_mapping.contiguous(),
        cache.view(E4M3),
        cache.view(torch.float32),
        tokens,
        cache.shape[0] * cache.shape[1],
        cache.shape[1],
        eps,
        rows.stride(0),
        cos.stride(0),
        INTERLEAVED=interleaved,
        ROWS=ROWS,
        num_warps=WARPS,
    )
