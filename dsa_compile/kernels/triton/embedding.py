"""Rows of the embedding table."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsa_compile.ops.library import bad_input


@triton.jit
def embedding_kernel(
    ids: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    vocabulary: int,
    width: int,
    BLOCK: tl.constexpr,
) -> None:
    """A piece of one row. An id that is not in the table reads nothing and gives NaN."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(ids + row).to(tl.int64)
    readable = tl.where((token >= 0) & (token < vocabulary), width, 0)
    values = tl.load(weight + token * width + column, column < readable, float("nan"))
    tl.store(out + row * width + column, values, column < width)


def embedding(ids: Tensor, weight: Tensor) -> Tensor:
    """``dsa::embedding``; ids outside of the table give rows of NaN."""
    if weight.dim() != 2 or not weight.is_contiguous() or ids.dtype.is_floating_point:
        raise bad_input("embedding", "whole-number ids and a contiguous table [V, D]")
    vocabulary, width = weight.shape
    out = torch.empty((*ids.shape, width), dtype=weight.dtype, device=weight.device)
    block = min(triton.next_power_of_2(width), 8192 if ids.numel() > 256 else 1024)
    embedding_kernel[(ids.numel(), triton.cdiv(width, block))](
        ids.contiguous(), weight, out, vocabulary, width, BLOCK=block, num_warps=4
    )
    return out
