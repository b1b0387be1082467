"""Block-scaled FP8 projections in Triton: for architectures without a kernel of their own."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["tokens"])
def linear_fp8_kernel(
    x: tl.tensor,
    x_scale: tl.tensor,
    weight: tl.tensor,
    weight_scale: tl.tensor,
    out: tl.tensor,
    tokens: int,
    rows: int,
    K: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """``TOKENS`` x ``ROWS`` of the output; ROWS divides 128, so that they share a scale."""
    BLOCKS: tl.constexpr = (K + 127) // 128
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, 128)
    token_inside, row_inside = token < tokens, row < rows
    # rows outside are read from the last one and not stored
    x_at = x + tl.minimum(token, tokens - 1).to(tl.int64)[:, None] * K + column[None, :]
    weight_at = weight + tl.minimum(row, rows - 1).to(tl.int64)[None, :] * K + column[:, None]
    x_scale_at = x_scale + tl.minimum(token, tokens - 1).to(tl.int64) * BLOCKS
    weight_scale_at = weight_scale + tl.program_id(1).to(tl.int64) * ROWS // 128 * BLOCKS
    total = tl.zeros((TOKENS, ROWS), tl.float32)
    for k in range(BLOCKS):
        if K % 128:
            inside = k * 128 + column < K
            values = tl.load(x_at + k * 128, inside[None, :], 0.0)
            weights = tl.load(weight_at + k * 128, inside[:, None], 0.0)
        else:
            values = tl.load(x_at + k * 128)
            weights = tl.load(weight_at + k * 128)
        scale = tl.load(x_scale_at + k) * tl.load(weight_scale_at + k)
        total += tl.dot(values, weights) * scale[:, None]
    to = out + token.to(tl.int64)[:, None] * rows + row[None, :]
    tl.store(to, total.to(tl.bfloat16), token_inside[:, None] & row_inside[None, :])


def linear_fp8(x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    """``dsa::linear_fp8``.

    Args:
        x: e4m3 ``[T, K]``.
        x_scale: fp32 ``[T, ceil(K/128)]``.
        weight: e4m3 ``[N, K]``.
        weight_scale: fp32 ``[ceil(N/128), ceil(K/128)]``.

    Returns:
        bf16 ``[T, N]``.
    """
    x, x_scale, weight, weight_scale = (
        operand.contiguous() for operand in (x, x_scale, weight, weight_scale)
    )
    tokens, rows = x.shape[0], weight.shape[0]
    out = torch.empty(tokens, rows, dtype=torch.bfloat16, device=x.device)
    if not tokens:
        return out
    wide = tokens > 64
    block_tokens, block_rows = (128, 128) if wide else (64 if tokens > 16 else 16, 32)
    linear_fp8_kernel[(triton.cdiv(tokens, block_tokens), triton.cdiv(rows, block_rows))](
        x,
        x_scale,
        weight,
        weight_scale,
        out,
        tokens,
        rows,
        K=x.shape[1],
        TOKENS=block_tokens,
        ROWS=block_rows,
        num_warps=8 if wide else 4,
        num_stages=4,
    )
    return out
