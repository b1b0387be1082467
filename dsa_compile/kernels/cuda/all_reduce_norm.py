"""Sum over ranks, addition, norm and quantisation in one kernel, a cluster of blocks a row.

See ``src/all_reduce.cuh`` for how ranks exchange their rows. Where they have no memory in common,
and for many rows, the sum is a collective of its own, and the rest the kernel of one rank.
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
from dsa_compile.kernels.cuda.replay_collective import ReplayedMemory
from dsa_compile.kernels.peer_limits import norms_with_sum
from dsa_compile.ops.collectives import all_reduce, communicator_of
from dsa_compile.ops.quantize import BLOCK, E4M3

Results = tuple[Tensor, Tensor, Tensor, Tensor]
_OP = "all_reduce_add_rms_norm_quantize"


_MOST_BLOCKS = 8
"""Blocks of a cluster on any GPU."""


@functools.cache
def blocks_of_a_row(width: int) -> int:
    """Blocks that share a row: the most whose part is whole FP8 blocks and whole warps."""
    return max(
        blocks
        for blocks in range(1, _MOST_BLOCKS + 1)
        if width % (blocks * BLOCK) == 0 and threads_for(width // blocks, 1)
    )


@functools.cache
def all_reduce_norm_kernel(ranks: int, width: int, weight: torch.dtype) -> CudaKernel:
    """The kernel for a number of ranks, rows of a width and weights of a dtype."""
    blocks = blocks_of_a_row(width)
    defines: Defines = {
        "RANKS": ranks,
        "WIDTH": width,
        "BLOCKS": blocks,
        "THREADS": threads_for(width // blocks, 1),
        "WEIGHT": C_TYPES[weight],
    }
    return CudaKernel(
        "all_reduce_norm.cu", "all_reduce_norm", defines, cluster=(blocks, 1, 1), overlap=True
    )


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
        if norms_with_sum(ranks, x.nbytes):
            anywhere = PeerMemory(0, (0,) * ranks, x, x.nbytes, 1.0)
            summed_norm(anywhere, x, residual, weight, eps, ue8m0)
        return add_rms_norm_quantize(x, residual, weight, eps, ue8m0)
    memory = communicator_of(axis, ranks).peer_memory(axis) if ranks > 1 else None
    if isinstance(memory, PeerMemory) and memory.norms(x):
        return summed_norm(memory, x, residual, weight, eps, ue8m0)
    if isinstance(memory, ReplayedMemory):
        total = memory.sum_to_norm(x, ranks)
    else:
        total = all_reduce(x, axis, ranks)
    return add_rms_norm_quantize(total, residual, weight, eps, ue8m0)


def summed_norm(
    memory: PeerMemory, x: Tensor, residual: Tensor, weight: Tensor, eps: float, ue8m0: bool
) -> Results:
    """Sum over ranks, addition to the residual, norm and quantisation in one kernel.

    Args:
        memory: that :meth:`PeerMemory.norms` ``x``.
        x: ``[..., D]``, a rank's part.
        residual: as ``x``.
        weight: ``[D]``.
        eps: added to the mean square.
        ue8m0: as in the op.
    """
    width = x.shape[-1]
    rows = rows_of_16_bytes(_OP, x.contiguous())
    residuals = rows_of_16_bytes(_OP, residual)
    normed, total = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    q = torch.empty(x.shape, dtype=E4M3, device=x.device)
    shape = (*x.shape[:-1], width // BLOCK)
    scale = torch.empty(shape, dtype=torch.float32, device=x.device)
    blocks = blocks_of_a_row(width)
    kernel = all_reduce_norm_kernel(len(memory.addresses), width, weight.dtype)
    kernel(
        (rows.shape[0] * blocks, 1, 1),
        threads_for(width // blocks, 1),
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
