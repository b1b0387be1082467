"""Normalisations of rows, a program a row."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsa_compile.kernels.triton.rows import as_rows


@triton.jit
def rms_norm_kernel(
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    total: tl.tensor,
    width: int,
    eps: float,
    x_stride: int,
    residual_stride: int,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Norm of a row, of the rounded sum of two rows if ``ADD``; rounds as the reference op."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    wide = tl.load(x + row * x_stride + column, inside, 0.0).to(tl.float32)
    gain = tl.load(weight + column, inside, 0.0).to(tl.float32)
    if ADD:
        wide += tl.load(residual + row * residual_stride + column, inside, 0.0).to(tl.float32)
        rounded = wide.to(total.dtype.element_ty)
        tl.store(total + row * width + column, rounded, inside)
        wide = rounded.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)
    # the norm is rounded before the product with the weight
    normed = (wide * inverse).to(total.dtype.element_ty).to(tl.float32)
    tl.store(out + row * width + column, (gain * normed).to(out.dtype.element_ty), inside)


@triton.jit
def layer_norm_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    width: int,
    eps: float,
    x_stride: int,
    BLOCK: tl.constexpr,
) -> None:
    """Layer norm of a row: fp32, rounded once."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    wide = tl.load(x + row * x_stride + column, inside, 0.0).to(tl.float32)
    gain = tl.load(weight + column, inside, 0.0).to(tl.float32)
    shift = tl.load(bias + column, inside, 0.0).to(tl.float32)
    centred = tl.where(inside, wide - tl.sum(wide, 0) / width, 0.0)
    inverse = tl.rsqrt(tl.sum(centred * centred, 0) / width + eps)
    normed = centred * inverse * gain + shift
    tl.store(out + row * width + column, normed.to(out.dtype.element_ty), inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``dsa::rms_norm`` for widths up to 32,768."""
    dtype = torch.promote_types(x.dtype, weight.dtype)
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    rows = as_rows(x)
    _launch_rms_norm(rows, rows, weight, eps, out, rows, add=False)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``dsa::add_rms_norm`` for widths up to 32,768."""
    dtype = torch.promote_types(x.dtype, residual.dtype)
    total = torch.empty(x.shape, dtype=dtype, device=x.device)
    out = torch.empty_like(total, dtype=torch.promote_types(dtype, weight.dtype))
    _launch_rms_norm(as_rows(x), as_rows(residual), weight, eps, out, total, add=True)
    return out, total


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """``dsa::layer_norm`` over the last dimension, for widths up to 32,768."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows, width = as_rows(x), x.shape[-1]
    layer_norm_kernel[(rows.shape[0],)](
        rows,
        weight.contiguous(),
        bias.contiguous(),
        out,
        width,
        eps,
        rows.stride(0),
        BLOCK=triton.next_power_of_2(width),
        num_warps=warps_for(width, rows.shape[0]),
    )
    return out


def warps_for(width: int, rows: int, inputs: int = 1) -> int:
    """Warps of a program that holds one row of each of its inputs, of a 16-bit type.

    With many rows, enough values a thread keep enough loads in flight; with few, more threads
    shorten the row's latency.
    """
    block: int = triton.next_power_of_2(width)
    values = (32 if block > 2048 else 16) // inputs if rows > 256 else 8
    return min(max(block // (32 * values), 1), 16)


def _launch_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    out: Tensor,
    total: Tensor,
    *,
    add: bool,
) -> None:
    rows, width = x.shape
    rms_norm_kernel[(rows,)](
        x,
        residual,
        weight.contiguous(),
        out,
        total,
        width,
        eps,
        x.stride(0),
        residual.stride(0),
        ADD=add,
        BLOCK=triton.next_power_of_2(width),
        num_warps=warps_for(width, rows, 2 if add else 1),
    )
