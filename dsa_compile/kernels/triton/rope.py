"""Rotary position embedding of heads, in both layouts, and its device functions."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsa_compile.kernels.triton.rows import as_rows


@triton.jit
def deinterleave(x: tl.tensor, ROWS: tl.constexpr, HALF: tl.constexpr) -> tl.tensor:
    """``[ROWS, 2 HALF]`` to its even and its odd columns."""
    return tl.split(tl.reshape(x, (ROWS, HALF, 2)))


@triton.jit(do_not_specialize=["rows"])
def rope_kernel(
    x: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    out: tl.tensor,
    rows: int,
    heads: int,
    token_stride: int,
    head_stride: int,
    table_stride: int,
    INTERLEAVED: tl.constexpr,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """``ROWS`` vectors of ``2 HALF``; every product is rounded, as by the reference."""
    dtype = x.dtype.element_ty
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = (row < rows)[:, None]
    token = (row // heads).to(tl.int64)
    start = (token * token_stride + row % heads * head_stride)[:, None]
    table = (token * table_stride)[:, None] + tl.arange(0, HALF)[None, :]
    c0 = tl.load(cos + table, inside, 0.0).to(tl.float32)
    s0 = tl.load(sin + table, inside, 0.0).to(tl.float32)
    if INTERLEAVED:
        pairs = tl.load(x + start + tl.arange(0, 2 * HALF)[None, :], inside, 0.0)
        first, second = deinterleave(pairs, ROWS, HALF)
        c1, s1 = c0, s0
    else:
        column = tl.arange(0, HALF)[None, :]
        first = tl.load(x + start + column, inside, 0.0)
        second = tl.load(x + start + HALF + column, inside, 0.0)
        c1 = tl.load(cos + HALF + table, inside, 0.0).to(tl.float32)
        s1 = tl.load(sin + HALF + table, inside, 0.0).to(tl.float32)
    first, second = first.to(tl.float32), second.to(tl.float32)
    a, b, c, d = first * c0, second * s0, second * c1, first * s1
    a, b = a.to(dtype).to(tl.float32), b.to(dtype).to(tl.float32)
    c, d = c.to(dtype).to(tl.float32), d.to(dtype).to(tl.float32)
    target = out + row.to(tl.int64)[:, None] * (2 * HALF) + tl.arange(0, HALF)[None, :]
    tl.store(target, (a - b).to(dtype), inside)
    tl.store(target + HALF, (c + d).to(dtype), inside)


def rope_interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``dsa::rope_interleaved`` for a power of two of values per head."""
    return _rope(x, cos, sin, interleaved=True)


def rope_half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``dsa::rope_half`` for a power of two of values per head."""
    return _rope(x, cos, sin, interleaved=False)


def _rope(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    heads, width = x.shape[-2:]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    # a slice of wider heads stays a view, its heads and tokens lying apart
    flat = x.reshape(-1, heads, width)
    if flat.stride(2) != 1:
        flat = flat.contiguous()
    cos, sin = as_rows(cos), as_rows(sin)
    if cos.stride(0) != sin.stride(0):
        cos, sin = cos.contiguous(), sin.contiguous()
    rows = flat.shape[0] * heads
    per_program, warps = _launch_shape(rows, width)
    rope_kernel[(triton.cdiv(rows, per_program),)](
        flat,
        cos,
        sin,
        out,
        rows,
        heads,
        flat.stride(0),
        flat.stride(1),
        cos.stride(0),
        INTERLEAVED=interleaved,
        HALF=width // 2,
        ROWS=per_program,
        num_warps=warps,
        enable_fp_fusion=False,  # fused, products would not be rounded
    )
    return out


def _launch_shape(rows: int, width: int) -> tuple[int, int]:
    """Vectors of a program, and its warps."""
    return (max(1, 1024 // width), 1) if rows >= 8192 else (4, 1)
