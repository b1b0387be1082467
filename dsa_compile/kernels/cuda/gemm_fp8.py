"""Block-scaled FP8 projections on Hopper."""

import torch
from torch import Tensor

from dsa_compile.kernels.cuda.gemm_fp8_large import linear_large
from dsa_compile.kernels.cuda.gemm_fp8_small import linear_small
from dsa_compile.kernels.cuda.gemm_fp8_tiles import choose_split
from dsa_compile.ops.library import bad_input
from dsa_compile.ops.quantize import BLOCK

_OP = "linear_fp8"
FEW_TOKENS = 64
"""Most tokens for which the time is that of reading the weight."""


def linear_fp8(x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    """``dsa::linear_fp8``.

    Args:
        x: e4m3 ``[T, K]``, K a multiple of 128; all operands contiguous, addresses of x and weight
            multiples of 16.
        x_scale: fp32 ``[T, K/128]``; beyond :data:`FEW_TOKENS` it may lie by columns instead, a
            multiple of 4 apart, which spares a launch.
        weight: e4m3 ``[N, K]``, N a multiple of 8.
        weight_scale: fp32 ``[ceil(N/128), K/128]``.

    Returns:
        bf16 ``[T, N]``.

    Raises:
        ValueError: other operands.
    """
    _check_layout(x, weight, weight_scale)
    if not x.shape[0]:
        return x.new_empty((0, weight.shape[0]), dtype=torch.bfloat16)
    tile = choose_split(x.shape[0], weight.shape[0], x.shape[1] // BLOCK)
    if tile is not None or x.shape[0] <= FEW_TOKENS:
        return linear_small(x, x_scale.contiguous(), weight, weight_scale, tile)
    return linear_large(x, x_scale, weight, weight_scale)


def _check_layout(x: Tensor, weight: Tensor, *scales: Tensor) -> None:
    for operand in (x, weight, *scales):
        if not operand.is_contiguous():
            raise bad_input(_OP, f"contiguous operands, not strides {operand.stride()}")
    if (x.data_ptr() | weight.data_ptr()) % 16:
        raise bad_input(_OP, "x and weight at addresses that are multiples of 16")
