"""Quantisation of activations to FP8."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsa_compile.kernels.triton.e4m3 import block_scale, reciprocal
from dsa_compile.kernels.triton.rows import as_rows
from dsa_compile.ops.quantize import BLOCK, E4M3, block_count


@triton.jit
def quantize_blocks_kernel(
    x: tl.tensor,
    q: tl.tensor,
    scale: tl.tensor,
    total: int,
    groups: int,
    width: int,
    x_stride: int,
    PARTIAL: tl.constexpr,
    UE8M0: tl.constexpr,
    GROUPS: tl.constexpr,
) -> None:
    """``GROUPS`` of the ``total`` groups of 128 values; a row of ``x`` has ``groups`` of them, the
    last one of fewer values if ``PARTIAL``."""
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    column = tl.arange(0, 128)[None, :]
    inside = group < total
    row, first = (group // groups).to(tl.int64), group % groups * 128
    start = row * x_stride + first
    valid = inside[:, None]
    if PARTIAL:
        valid = valid & (first[:, None] + column < width)
    values = tl.load(x + start[:, None] + column, valid, 0.0).to(tl.float32)
    scales = block_scale(tl.max(tl.abs(values), 1), UE8M0)
    quantized = (values * reciprocal(scales)[:, None]).to(tl.float8e4nv)
    tl.store(q + (row * width + first)[:, None] + column, quantized, valid)
    tl.store(scale + group, scales, inside)


def quantize_blocks(x: Tensor, ue8m0: bool) -> tuple[Tensor, Tensor]:
    """``dsa::quantize_blocks``."""
    width = x.shape[-1]
    partial = width % BLOCK != 0
    q = torch.empty(x.shape, dtype=E4M3, device=x.device)
    shape = (*x.shape[:-1], block_count(width))
    scale = torch.empty(shape, dtype=torch.float32, device=x.device)
    # rows without gaps are as well rows of one group each, which saves the division
    rows = x.view(-1, BLOCK) if x.is_contiguous() and not partial else as_rows(x)
    total = scale.numel()
    groups = groups_per_program(total)
    quantize_blocks_kernel[(triton.cdiv(total, groups),)](
        rows,
        q,
        scale,
        total,
        block_count(rows.shape[1]),
        rows.shape[1],
        rows.stride(0),
        PARTIAL=partial,
        UE8M0=ue8m0,
        GROUPS=groups,
        num_warps=4,
    )
    return q, scale


def groups_per_program(total: int) -> int:
    """Groups of 128 values for a program of 4 warps: all processors busy, then wide programs."""
    return 16 if total >= 8192 else 4
