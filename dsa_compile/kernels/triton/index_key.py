"""The indexer's FP8 keys, from the raw projection into pages, in one kernel."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsa_compile.kernels.triton.hadamard import partners, quantize_rows, rotate, transform
from dsa_compile.kernels.triton.rows import as_rows
from dsa_compile.ops.library import bad_input
from dsa_compile.ops.quantize import E4M3

"""Sizes of a key between which a product on the tensor cores transforms it."""
ROWS, WARPS = 16, 4
"""Keys of a program, the fewest that such a product takes, and its warps."""


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
    D: tl.constexpr,
    ROPE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """``ROWS`` keys. ``cache`` and ``cache_scale`` are views of one memory, e4m3 and fp32."""
    dtype = k.dtype.element_ty
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    slot = tl.load(slots + token, token < tokens, -1)
    kept = (slot >= 0) & (slot < cache_rows)
    slot = tl.where(kept, slot, 0).to(tl.int32)  # cheaper to divide
    valid = kept[:, None]
    column = tl.arange(0, D)
    other = partners(D, ROPE, INTERLEAVED)
    row = k + (token.to(tl.int64) * k_stride)[:, None]
    key = tl.load(row + column[None, :], valid, 0.0).to(tl.float32)
    partner = tl.load(row + other[None, :], valid, 0.0).to(tl.float32)

    mean = (tl.sum(key, 1) / D)[:, None]
    key, partner = key - mean, partner - mean
    inverse = tl.rsqrt(tl.sum(key * key, 1) / D + eps)[:, None]
    key = _affine(key * inverse, weight + column, bias + column, dtype)
    partner = _affine(partner * inverse, weight + other, bias + other, dtype)

    table = (token.to(tl.int64) * table_stride)[:, None]
    key = rotate(key, partner, cos + table, sin + table, valid, D, ROPE, INTERLEAVED)
    quantized, scales = quantize_rows(transform(key.to(dtype), D))

    # a page: all its keys, then all its scales
    page = (slot // block_size * block_size).to(tl.int64)
    offset = (slot % block_size).to(tl.int64)
    target = cache + page * (D + 4) + offset * D
    tl.store(target[:, None] + column[None, :], quantized, valid)
    tl.store(cache_scale + page * (D // 4 + 1) + block_size * (D // 4) + offset, scales, kept)


@triton.jit
def _affine(x: tl.tensor, weight: tl.tensor, bias: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """Rounded to ``dtype``, in fp32."""
    gain, offset = tl.load(weight).to(tl.float32), tl.load(bias).to(tl.float32)
    return (x * gain[None, :] + offset[None, :]).to(dtype).to(tl.float32)


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
    """``dsa::write_index_key_fp8`` for 16-bit keys of 16, 32, 64 or 128."""
    dim, rope_dim = k.shape[-1], cos.shape[-1]
    if not cache.is_contiguous():
        raise bad_input("write_index_key_fp8", "a contiguous cache")
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
        D=dim,
        ROPE=rope_dim,
        INTERLEAVED=interleaved,
        ROWS=ROWS,
        num_warps=WARPS,
    )
