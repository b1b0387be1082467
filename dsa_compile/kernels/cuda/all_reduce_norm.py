"""Sum over ranks, addition, norm and quantisation in one kernel, a block of threads a row.

See ``src/all_reduce.cuh`` for how ranks exchange their rows. Where they have no memory in common,
for many rows, and among more than two ranks, the sum is a collective of its own, and the rest the
kernel of one rank.
"""

import functools

import torch
from torch import Tensor

from dsa_compile.kernels.cuda.compiler import Defines
from dsa_compile.kernels.cuda.device import rehearsal
from dsa_compile.kernels.cuda.launch import CudaKernel, Int64
from dsa_compile.kernels.cuda.norm_quantize import add_rms_norm_quantize, threads_for
from dsa_compile.kernels.cuda.operands import C_TYPES, rows_of_16_bytes
from dsa_compile.kernels.cuda.peer_memory import PeerMemory
from dsa_compile.kernels.peer_limits import norms_with_sum
from dsa_compile.ops.collectives import all_reduce, communicator_of
from dsa_compile.ops.quantize import BLOCK, E4M3

Results = tuple[Tensor, Tensor, Tensor, Tensor]
_OP = "all_reduce_add_rms_norm_quantize"


@functools.cache
def _kernel(ranks: int, width: int, threads: int, weight: torch.dtype) -> CudaKernel:
    defines: Defines = {
        "RANKS": ranks,
        "WIDTH": width,
        "THREADS": threads,
        "WEIGHT": C_TYPES[weight],
    }
    return CudaKernel("all_reduce_norm.cu", "all_reduce_norm", defines, overlap=True)


def all_reduce_add_rms_norm_quantize(
    x: Tensor,
    axis: str,
    ranks: int,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    ue8m0: bool,
) -> Results:
    """``dsa::all_reduce_add_rms_norm_quantize`` for bf16 rows of a multiple of 256 values."""
    if rehearsal():
        if norms_with_sum(ranks):
            anywhere = PeerMemory(0, (0,) * ranks, x, x.nbytes, 1.0)
            summed_norm(anywhere, x, residual, weight, eps, ue8m0)
        return add_rms_norm_quantize(x, residual, weight, eps, ue8m0)
    memory = communicator_of(axis, ranks).peer_memory(axis) if ranks > 1 else None
    if isinstance(memory, PeerMemory) and norms_with_sum(ranks) and memory.takes(x):
        return summed_norm(memory, x, residual, weight, eps, ue8m0)
    return add_rms_norm_quantize(all_reduce(x, axis, ranks), residual, weight, eps, ue8m0)


def summed_norm(
    memory: PeerMemory, x: Tensor, residual: Tensor, weight: Tensor, eps: float, ue8m0: bool
) -> Results:
    """Sum over ranks, addition to the residual, norm and quantisation in one kernel.

    Args:
        memory: that :meth:`PeerMemory.takes` ``x``.
        x: ``[..., D]``, a rank's part.
        residual: as ``x``.
        weight: ``[D]``.
        eps: added to the mean square.
        ue8m0: as in the op.
    """
    width = x.shape[-1]
    rows = x.contiguous().view(-1, width)
    residuals = rows_of_16_bytes(_OP, residual)
    normed, total = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    q = torch.empty(x.shape, dtype=E4M3, device=x.device)
    shape = (*x.shape[:-1], width // BLOCK)
    scale = torch.empty(shape, dtype=torch.float32, device=x.device)
    threads = threads_for(width, 1)
    kernel = _kernel(len(memory.addresses), width, threads, weight.dtype)
    kernel(
        (rows.shape[0], 1, 1),
        threads,
        rows,
        residuals,
        weight,
        normed,
        q,
        scale,
        total,
        eps,
        ue8m0,
        Int64(residuals.stride(0)),
        *memory.arguments(),
    )
    return normed, q, scale, total
