"""Cosines and sines of rotary position embedding, where torch takes eight kernels."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["rows"])
def rope_tables_kernel(
    positions: tl.tensor,
    inv_freq: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    rows: int,
    half: int,
    scaling: float,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """Both tables of ``ROWS`` positions; angles are rounded to fp32, as by the reference."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, HALF)[None, :]
    inside = (row < rows) & (column < half)
    position = tl.load(positions + row, row < rows, 0).to(tl.float32)
    angle = position * tl.load(inv_freq + column, column < half, 0.0)
    dtype = cos.dtype.element_ty
    c = (tl.cos(angle) * scaling).to(dtype)
    s = (tl.sin(angle) * scaling).to(dtype)
    place = row.to(tl.int64) * (2 * half) + column
    tl.store(cos + place, c, inside)
    tl.store(cos + place + half, c, inside)
    tl.store(sin + place, s, inside)
    tl.store(sin + place + half, s, inside)


def rope_tables(
    positions: Tensor, inv_freq: Tensor, scaling: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """``dsa::rope_tables``."""
    half = inv_freq.shape[0]
    cos, sin = (
        torch.empty((*positions.shape, 2 * half), dtype=dtype, device=positions.device)
        for _ in range(2)
    )
    rows, per_program = positions.numel(), 4
    rope_tables_kernel[(triton.cdiv(rows, per_program),)](
        positions.contiguous(),
        inv_freq.contiguous(),
        cos,
        sin,
        rows,
        half,
        scaling,
        HALF=triton.next_power_of_2(half),
        ROWS=per_program,
        num_warps=1,
    )
    return cos, sin
