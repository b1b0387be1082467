"""Root-mean-square norm into FP8 blocks, a block of threads a row, everything in registers."""

import functools

import torch
from torch import Tensor

from dsa_compile.kernels.cuda.compiler import Defines
from dsa_compile.kernels.cuda.launch import CudaKernel, Int64
from dsa_compile.kernels.cuda.operands import C_TYPES, require_constants, rows_of_16_bytes
from dsa_compile.ops.quantize import BLOCK, E4M3

CHUNK = 8
"""Values of one 16-byte access."""


@functools.cache
def _kernel(width: int, threads: int, weight: torch.dtype, add: bool, keep: bool) -> CudaKernel:
    defines: Defines = {
        "WIDTH": width,
        "THREADS": threads,
        "WEIGHT": C_TYPES[weight],
        "ADD": int(add),
        "KEEP": int(keep),
    }
    return CudaKernel("norm_quantize.cu", "norm_quantize", defines, overlap=True)


@functools.cache
def threads_for(width: int, chunks: int) -> int:
    """Threads of a row, whole warps that divide its chunks; 0 if there are none.

    Args:
        width: values of a row.
        chunks: of a thread, at least; narrow rows take fewer, so as to have six warps.
    """
    in_row = width // CHUNK
    most = min(max(in_row // chunks, 192), in_row, 1024)
    fitting = [n for n in range(32, most + 1, 32) if width % (CHUNK * n) == 0]
    return max(fitting, default=0)


def rms_norm_quantize(x: Tensor, weight: Tensor, eps: float, ue8m0: bool) -> tuple[Tensor, Tensor]:
    """``dsa::rms_norm_quantize`` for bf16 rows of a multiple of 256 values."""
    q, scale = _outputs("rms_norm_quantize", x, weight)
    rows = rows_of_16_bytes("rms_norm_quantize", x)
    _launch(rows, None, weight, None, q, scale, None, eps, ue8m0)
    return q, scale


def rms_norm_quantize_keep(
    x: Tensor, weight: Tensor, eps: float, ue8m0: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """``dsa::rms_norm_quantize_keep`` for bf16 rows of a multiple of 256 values."""
    q, scale = _outputs("rms_norm_quantize_keep", x, weight)
    normed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows = rows_of_16_bytes("rms_norm_quantize_keep", x)
    _launch(rows, None, weight, normed, q, scale, None, eps, ue8m0)
    return normed, q, scale


def add_rms_norm_quantize(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, ue8m0: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``dsa::add_rms_norm_quantize`` for bf16 rows of a multiple of 256 values."""
    name = "add_rms_norm_quantize"
    q, scale = _outputs(name, x, weight)
    normed, total = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    rows, residuals = rows_of_16_bytes(name, x), rows_of_16_bytes(name, residual)
    _launch(rows, residuals, weight, normed, q, scale, total, eps, ue8m0)
    return normed, q, scale, total


def _outputs(op: str, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    width = x.shape[-1]
    require_constants(op, weight)
    q = torch.empty(x.shape, dtype=E4M3, device=x.device)
    return q, torch.empty((*x.shape[:-1], width // BLOCK), dtype=torch.float32, device=x.device)


def _launch(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    normed: Tensor | None,
    q: Tensor,
    scale: Tensor,
    total: Tensor | None,
    eps: float,
    ue8m0: bool,
) -> None:
    rows, width = x.shape
    # a row alone is done soonest with a chunk a thread; many do better with more loads in flight,
    # up to what the registers hold
    few = rows <= 264
    threads = threads_for(width, 1 if few else 4 if normed is None else 2)
    kernel = _kernel(width, threads, weight.dtype, residual is not None, normed is not None)
    kernel(
        (rows, 1, 1),
        threads,
        x,
        residual,
        weight,
        normed,
        q,
        scale,
        total,
        eps,
        ue8m0,
        Int64(x.stride(0)),
        Int64(residual.stride(0) if residual is not None else 0),
    )
