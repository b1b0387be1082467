"""The indexer's FP8 queries and folded head weights, in one kernel."""

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
from dsa_compile.ops.library import bad_input
from dsa_compile.ops.quantize import E4M3

DIM, ROPE_DIM = 128, 64
ROWS = 16
"""Vectors of a program: the fewest that a product on the tensor cores takes."""


@triton.jit(do_not_specialize=["rows"])
def index_query_kernel(
    q: tl.tensor,
    weights: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    out: tl.tensor,
    weights_out: tl.tensor,
    rows: int,
    heads: int,
    scale: float,
    token_stride: int,
    head_stride: int,
    weights_stride: int,
    table_stride: int,
    INTERLEAVED: tl.constexpr,
    ONE_TOKEN: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """``ROWS`` (token, head) pairs, all of one token if ``ONE_TOKEN``."""
    dtype = q.dtype.element_ty
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    valid = inside[:, None]
    token = (row // heads).to(tl.int64)
    head = row % heads
    start = q + (token * token_stride + head * head_stride)[:, None] + tl.arange(0, TILE)[None, :]
    a = tl.load(start, valid, 0.0).to(tl.float32)
    b = tl.load(start + TILE, valid, 0.0).to(tl.float32)
    c = tl.load(start + 2 * TILE, valid, 0.0)
    d = tl.load(start + 3 * TILE, valid, 0.0)
    folded = tl.load(weights + token * weights_stride + head, inside, 0.0) * scale
    if ONE_TOKEN:
        only = (tl.program_id(0) * ROWS // heads).to(tl.int64)
        table = only * table_stride + tl.zeros((1, 1), tl.int64)
        a, b = rotate(a, b, cos + table, sin + table, True, ROWS, INTERLEAVED)
    else:
        table = (token * table_stride)[:, None]
        a, b = rotate(a, b, cos + table, sin + table, valid, ROWS, INTERLEAVED)
    a, b, c, d = transform(a.to(dtype), b.to(dtype), c, d, dtype)
    scales = common_scale(a, b, c, d)
    store_tiles(out + row.to(tl.int64)[:, None] * (4 * TILE), a, b, c, d, scales, valid)
    tl.store(weights_out + row, folded * scales, inside)


def index_query_quantize(
    q: Tensor, weights: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """``dsa::index_query_quantize`` for 16-bit heads of 128, of which 64 are rotated."""
    if q.dim() != 3 or q.shape[2] != DIM or q.element_size() != 2 or cos.shape[-1] != ROPE_DIM:
        raise bad_input(
            "index_query_quantize",
            f"q [T, H, {DIM}] of 16 bits and tables [T, {ROPE_DIM}], not {list(q.shape)} "
            f"{q.dtype} and {list(cos.shape)}",
        )
    if weights.dtype is not torch.float32 or weights.shape != q.shape[:2]:
        raise bad_input(
            "index_query_quantize",
            f"weights float32 {list(q.shape[:2])}, not {weights.dtype} {list(weights.shape)}",
        )
    tokens, heads, _ = q.shape
    out = torch.empty(q.shape, dtype=E4M3, device=q.device)
    weights_out = torch.empty(weights.shape, dtype=torch.float32, device=q.device)
    if q.stride(2) != 1:
        q = q.contiguous()
    weights, cos, sin = as_rows(weights), as_rows(cos), as_rows(sin)
    if cos.stride(0) != sin.stride(0):
        cos, sin = cos.contiguous(), sin.contiguous()
    rows = tokens * heads
    index_query_kernel[(triton.cdiv(rows, ROWS),)](
        q,
        weights,
        cos,
        sin,
        out,
        weights_out,
        rows,
        heads,
        scale,
        q.stride(0),
        q.stride(1),
        weights.stride(0),
        cos.stride(0),
        INTERLEAVED=interleaved,
        ONE_TOKEN=heads % ROWS == 0,
        ROWS=ROWS,
        num_warps=1,
    )
    return out, weights_out
