"""The indexer's FP8 queries and folded head weights, in one kernel."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsa_compile.kernels.triton.hadamard import partners, quantize_rows, rotate, transform
from dsa_compile.kernels.triton.index_key import ROWS, WARPS
from dsa_compile.kernels.triton.rows import as_rows
from dsa_compile.ops.quantize import E4M3


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
    D: tl.constexpr,
    ROPE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """``ROWS`` (token, head) pairs."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    valid = inside[:, None]
    token = (row // heads).to(tl.int64)
    head = row % heads
    column = tl.arange(0, D)[None, :]
    start = q + (token * token_stride + head * head_stride)[:, None]
    query = tl.load(start + column, valid, 0.0).to(tl.float32)
    partner = tl.load(start + partners(D, ROPE, INTERLEAVED)[None, :], valid, 0.0).to(tl.float32)
    folded = tl.load(weights + token * weights_stride + head, inside, 0.0) * scale
    table = (token * table_stride)[:, None]
    query = rotate(query, partner, cos + table, sin + table, valid, D, ROPE, INTERLEAVED)
    quantized, scales = quantize_rows(transform(query.to(q.dtype.element_ty), D))
    tl.store(out + row.to(tl.int64)[:, None] * D + column, quantized, valid)
    tl.store(weights_out + row, folded * scales, inside)


def index_query_quantize(
    q: Tensor, weights: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """``dsa::index_query_quantize`` for 16-bit heads of 16, 32, 64 or 128."""
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
        D=q.shape[2],
        ROPE=cos.shape[1],
        INTERLEAVED=interleaved,
        ROWS=ROWS,
        num_warps=WARPS,
    )
    return out, weights_out
