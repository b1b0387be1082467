"""The gated activation, alone and into FP8 blocks."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsa_compile.kernels.triton.e4m3 import block_scale, reciprocal
from dsa_compile.kernels.triton.quantize import groups_per_program
from dsa_compile.kernels.triton.rows import as_rows
from dsa_compile.ops.quantize import BLOCK, E4M3, block_count


@triton.jit
def silu(x: tl.tensor) -> tl.tensor:
    """``x * sigmoid(x)`` in fp32."""
    return x / (1.0 + tl.exp(-x))


@triton.jit
def swiglu_kernel(
    gate: tl.tensor,
    up: tl.tensor,
    out: tl.tensor,
    width: int,
    gate_stride: int,
    up_stride: int,
    BLOCK_WIDTH: tl.constexpr,
) -> None:
    """A piece of one row; silu is rounded before the product, as in the reference op."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)
    inside = column < width
    g = tl.load(gate + row * gate_stride + column, inside, 0.0)
    u = tl.load(up + row * up_stride + column, inside, 0.0).to(tl.float32)
    activated = silu(g.to(tl.float32)).to(g.dtype).to(tl.float32)
    tl.store(out + row * width + column, (activated * u).to(out.dtype.element_ty), inside)


@triton.jit
def swiglu_packed_quantize_kernel(
    gate_up: tl.tensor,
    q: tl.tensor,
    scale: tl.tensor,
    total: int,
    groups: int,
    width: int,
    stride: int,
    PARTIAL: tl.constexpr,
    UE8M0: tl.constexpr,
    GROUPS: tl.constexpr,
) -> None:
    """``GROUPS`` of the ``total`` groups of 128 results; a row of ``width`` has ``groups`` of them,
    the last one of fewer values if ``PARTIAL``."""
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    column = tl.arange(0, 128)[None, :]
    inside = group < total
    row, first = (group // groups).to(tl.int64), group % groups * 128
    address = gate_up + (row * stride + first)[:, None] + column
    valid = inside[:, None]
    if PARTIAL:
        valid = valid & (first[:, None] + column < width)
    g = tl.load(address, valid, 0.0)
    u = tl.load(address + width, valid, 0.0).to(tl.float32)
    values = (silu(g.to(tl.float32)) * u).to(g.dtype).to(tl.float32)
    scales = block_scale(tl.max(tl.abs(values), 1), UE8M0)
    quantized = (values * reciprocal(scales)[:, None]).to(tl.float8e4nv)
    tl.store(q + (row * width + first)[:, None] + column, quantized, valid)
    tl.store(scale + group, scales, inside)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """``dsa::swiglu``."""
    return _swiglu(as_rows(gate), as_rows(up), gate.shape)


def swiglu_packed(gate_up: Tensor) -> Tensor:
    """``dsa::swiglu_packed``."""
    gate, up = as_rows(gate_up).chunk(2, -1)
    return _swiglu(gate, up, torch.Size((*gate_up.shape[:-1], gate.shape[1])))


def _swiglu(gate: Tensor, up: Tensor, shape: torch.Size) -> Tensor:
    out = torch.empty(shape, dtype=gate.dtype, device=gate.device)
    rows, width = gate.shape
    block = min(triton.next_power_of_2(width), 2048 if rows * width >= 1 << 20 else 512)
    swiglu_kernel[(rows, triton.cdiv(width, block))](
        gate, up, out, width, gate.stride(0), up.stride(0), BLOCK_WIDTH=block, num_warps=4
    )
    return out


def swiglu_packed_quantize(gate_up: Tensor, ue8m0: bool) -> tuple[Tensor, Tensor]:
    """``dsa::swiglu_packed_quantize``."""
    half = gate_up.shape[-1] // 2
    rows = as_rows(gate_up)
    shape = gate_up.shape[:-1]
    q = torch.empty((*shape, half), dtype=E4M3, device=gate_up.device)
    scale = torch.empty((*shape, block_count(half)), dtype=torch.float32, device=gate_up.device)
    total = scale.numel()
    groups = groups_per_program(total)
    swiglu_packed_quantize_kernel[(triton.cdiv(total, groups),)](
        rows,
        q,
        scale,
        total,
        block_count(half),
        half,
        rows.stride(0),
        PARTIAL=half % BLOCK != 0,
        UE8M0=ue8m0,
        GROUPS=groups,
        num_warps=4,
    )
    return q, scale
