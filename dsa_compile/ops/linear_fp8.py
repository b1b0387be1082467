"""Projections in FP8: e4m3 operands with block scales, the published checkpoint's layout."""

import torch
from torch import Tensor

from dsa_compile.ops.facts import CostFacts, Family, OpFacts, products
from dsa_compile.ops.library import define
from dsa_compile.ops.quantize import BLOCK, block_count


def linear_fp8(x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    """Product of block-quantised operands: ``(x · x_scale) @ (weight · weight_scale).T``.

    The sum over each block of 128 of K is taken in fp32, multiplied by the product of its two
    scales, and added in fp32 (DeepSeek-V3 report, arXiv:2412.19437, 3.3.2).

    Args:
        x: e4m3 ``[T, K]``.
        x_scale: fp32 ``[T, ceil(K/128)]``.
        weight: e4m3 ``[N, K]``.
        weight_scale: fp32 ``[ceil(N/128), ceil(K/128)]``, the checkpoint's ``weight_scale_inv``.

    Returns:
        bf16 ``[T, N]``.
    """
    tokens, k = x.shape
    rows = weight.shape[0]
    by_row = weight_scale.repeat_interleave(BLOCK, 0)[:rows]
    out = torch.zeros(tokens, rows, dtype=torch.float32, device=x.device)
    for block in range(block_count(k)):
        columns = slice(block * BLOCK, (block + 1) * BLOCK)
        part = x[:, columns].float() @ weight[:, columns].float().T
        out += part * (x_scale[:, block, None] * by_row[None, :, block])
    return out.bfloat16()


LINEAR_FP8 = define(
    "linear_fp8(Tensor x, Tensor x_scale, Tensor weight, Tensor weight_scale) -> Tensor",
    linear_fp8,
    "(x: e4m3[T, K], x_scale: f32[T, block_count(K)], weight: e4m3[N, K],"
    " weight_scale: f32[block_count(N), block_count(K)]) -> bf16[T, N]",
    OpFacts(
        Family.LINEAR,
        sums=("K",),
        cost=CostFacts(e4m3_products=True, flops=products("weight")),
    ),
)
