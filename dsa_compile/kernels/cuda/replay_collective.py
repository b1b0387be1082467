"""A collective's stand-in on one GPU: copies of the operand, and a kernel of a given duration."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dsa_compile.kernels.cuda.launch import CudaKernel, Int64
from dsa_compile.kernels.cuda.peer_memory import MOST_OPERANDS

CHUNK = 16
_THREADS, _MOST_BLOCKS = 256, 264

REPLAY = CudaKernel("replay_collective.cu", "replay_collective", overlap=True)
REPLAY_MANY = CudaKernel("replay_collective_many.cu", "replay_collective_many", overlap=True)
REPLAY_CHOICES = CudaKernel("replay_collective.cu", "replay_choices", overlap=True)


@dataclass(frozen=True)
class ReplayedMemory:
    """Stands in for memory of ranks that are not there.

    Attributes:
        sum_to_norm: the own operand in place of the sum over a number of ranks. With the norm
            launched behind it, it takes as long as the kernel that does both.
    """

    sum_to_norm: Callable[[Tensor, int], Tensor]


def replay_collective(x: Tensor, out: Tensor, wait: Tensor) -> None:
    """Fill ``out`` with copies of ``x``, and take as long as ``wait`` says.

    Args:
        x: contiguous, of a multiple of 16 bytes.
        out: one or more parts of the shape and dtype of ``x``, contiguous.
        wait: int64 ``[1]`` on the GPU, nanoseconds from the kernel's start to its end; read when
            the kernel runs, so that a captured graph may be replayed with others.
    """
    chunks, copies = x.nbytes // CHUNK, out.nbytes // max(1, x.nbytes)
    blocks = min(max(1, -(-chunks // _THREADS)), _MOST_BLOCKS)
    REPLAY((blocks, 1, 1), _THREADS, x, out, Int64(chunks), copies, wait)


def replay_choices(indices: Tensor, out: Tensor, experts: int, wait: Tensor) -> None:
    """Fill ``out`` with the experts that the tokens of all ranks might choose.

    With copies of one rank's choices, tokens of all ranks would go to the same experts: fewer would
    be hit, and fewer bytes read. Part ``r`` of ``n`` is turned by ``r * experts / n``, so that the
    rank's own experts get other choices of each part.

    Args:
        indices: int64, contiguous; numbers outside of 0 to ``experts`` - 1 stay as they are.
        out: one or more parts of the shape of ``indices``, int64, contiguous.
        experts: that the router chooses from.
        wait: as for :func:`replay_collective`.
    """
    count, copies = indices.numel(), out.numel() // max(1, indices.numel())
    blocks = min(max(1, -(-count // _THREADS)), _MOST_BLOCKS)
    arguments = (indices, out, Int64(count), copies, Int64(experts), wait)
    REPLAY_CHOICES((blocks, 1, 1), _THREADS, *arguments)


def replay_many(
    xs: Sequence[Tensor], outs: Sequence[Tensor], copies: int, experts: int, wait: Tensor
) -> None:
    """Fill each of ``outs`` with copies of one of ``xs``, by one kernel.

    Args:
        xs: 1 to 4, contiguous; below 2 GiB each with its copies. Of int64 and with ``experts``,
            numbers of experts as of :func:`replay_choices`.
        outs: ``[copies, *x.shape]`` of each, contiguous.
        copies: as many as ranks.
        experts: that the router chooses from; 0 to copy all operands as they are.
        wait: as for :func:`replay_collective`.
    """
    nothing: list[None] = [None] * (MOST_OPERANDS - len(xs))
    sizes = [x.nbytes for x in xs] + [0] * len(nothing)
    chunks = sum(-(-size // CHUNK) for size in sizes)
    numbers = [experts and x.dtype == torch.int64 for x in xs]
    choices = sum(1 << place for place, chosen in enumerate(numbers) if chosen)
    blocks = min(max(1, -(-chunks // _THREADS)), _MOST_BLOCKS)
    operands = (*xs, *nothing, *outs, *nothing, *sizes)
    arguments = (*operands, chunks, copies, choices, Int64(max(1, experts)), wait)
    REPLAY_MANY((blocks, 1, 1), _THREADS, *arguments)


def turned_choices(indices: Tensor, copies: int, experts: int) -> Tensor:
    """Choices as :func:`replay_choices` writes them, by torch: ``[copies, *indices.shape]``."""
    routed = (indices >= 0) & (indices < experts)
    turns = torch.arange(copies, device=indices.device) * experts // copies
    turns = turns.view(-1, *[1] * indices.ndim)
    return torch.where(routed, (indices + turns) % experts, indices)
