"""Root-mean-square norm into FP8 blocks, with the residual's addition before it."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsa_compile.kernels.triton.e4m3 import block_scale, reciprocal
from dsa_compile.kernels.triton.norm import warps_for
from dsa_compile.kernels.triton.rows import as_rows
from dsa_compile.ops.quantize import BLOCK, E4M3, block_count


@triton.jit
def norm_quantize_kernel(
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    normed: tl.tensor,
    q: tl.tensor,
    scale: tl.tensor,
    total: tl.tensor,
    groups: int,
    width: int,
    eps: float,
    x_stride: int,
    residual_stride: int,
    ADD: tl.constexpr,
    KEEP: tl.constexpr,
    PARTIAL: tl.constexpr,
    UE8M0: tl.constexpr,
    GROUPS: tl.constexpr,
) -> None:
    """One row as ``[groups, 128]``, the last group of fewer values if ``PARTIAL``. The norm sees
    the sum in fp32, before it is rounded."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS)
    column = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    inside = (group < groups)[:, None]
    if PARTIAL:
        inside = column < width
    wide = tl.load(x + row * x_stride + column, inside, 0.0).to(tl.float32)
    gain = tl.load(weight + column, inside, 0.0).to(tl.float32)
    dense = row * width + column
    if ADD:
        wide += tl.load(residual + row * residual_stride + column, inside, 0.0).to(tl.float32)
        tl.store(total + dense, wide.to(total.dtype.element_ty), inside)
    mean = tl.sum(tl.sum(wide * wide, 1), 0) / width
    rounded = (wide * tl.rsqrt(mean + eps) * gain).to(x.dtype.element_ty)
    if KEEP:
        tl.store(normed + dense, rounded, inside)
    values = rounded.to(tl.float32)
    scales = block_scale(tl.max(tl.abs(values), 1), UE8M0)
    tl.store(q + dense, (values * reciprocal(scales)[:, None]).to(tl.float8e4nv), inside)
    tl.store(scale + row * groups + group, scales, group < groups)


def rms_norm_quantize(x: Tensor, weight: Tensor, eps: float, ue8m0: bool) -> tuple[Tensor, Tensor]:
    """``dsa::rms_norm_quantize`` for widths up to 32,768."""
    q, scale = _outputs(x)
    rows = as_rows(x)
    _launch(rows, rows, weight, eps, ue8m0, rows, q, scale, rows, add=False, keep=False)
    return q, scale


def rms_norm_quantize_keep(
    x: Tensor, weight: Tensor, eps: float, ue8m0: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """``dsa::rms_norm_quantize_keep`` for widths up to 32,768."""
    q, scale = _outputs(x)
    normed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows = as_rows(x)
    _launch(rows, rows, weight, eps, ue8m0, normed, q, scale, rows, add=False, keep=True)
    return normed, q, scale


def add_rms_norm_quantize(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, ue8m0: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``dsa::add_rms_norm_quantize`` for widths up to 32,768."""
    q, scale = _outputs(x)
    normed, total = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    _launch(
        as_rows(x),
        as_rows(residual),
        weight,
        eps,
        ue8m0,
        normed,
        q,
        scale,
        total,
        add=True,
        keep=True,
    )
    return normed, q, scale, total


def _outputs(x: Tensor) -> tuple[Tensor, Tensor]:
    width = x.shape[-1]
    q = torch.empty(x.shape, dtype=E4M3, device=x.device)
    shape = (*x.shape[:-1], block_count(width))
    return q, torch.empty(shape, dtype=torch.float32, device=x.device)


def _launch(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    ue8m0: bool,
    normed: Tensor,
    q: Tensor,
    scale: Tensor,
    total: Tensor,
    *,
    add: bool,
    keep: bool,
) -> None:
    rows, width = x.shape
    norm_quantize_kernel[(rows,)](
        x,
        residual,
        weight.contiguous(),
        normed,
        q,
        scale,
        total,
        block_count(width),
        width,
        eps,
        x.stride(0),
        residual.stride(0),
        ADD=add,
        KEEP=keep,
        PARTIAL=width % BLOCK != 0,
        UE8M0=ue8m0,
        GROUPS=triton.next_power_of_2(block_count(width)),
        num_warps=warps_for(width, rows),
    )
