"""Memory of all ranks that each of them can store to, and all-reduces through it.

See ``src/all_reduce.cuh`` for how they work.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dsa_compile.kernels.cuda.launch import CudaKernel, Int64

MOST_RANKS = 8
_LINE, _CHUNK = 16, 16  # bytes; a line carries 8 of data
_THREADS = 256
_MOST_BLOCKS = 264


@dataclass(frozen=True)
class PeerMemory:
    """Buffers for all-reduces, one in the memory of each rank, and zeros before the first.

    Attributes:
        rank: of this process.
        addresses: where this process finds the buffer of each rank, ``nbytes`` long.
        state: int32 ``[2]`` on this rank's GPU, zeros.
        capacity: bytes of the largest operand, a multiple of 16.
        patience: seconds after which a kernel that waits for a peer ends the use of the GPU.
        owner: keeps the addresses valid.
    """

    rank: int
    addresses: tuple[int, ...]
    state: Tensor
    capacity: int
    patience: float
    owner: object = None

    @staticmethod
    def nbytes(ranks: int, capacity: int) -> int:
        """Bytes of a rank's buffer."""
        return 2 * ranks * lines_of(capacity) * _LINE

    def takes(self, x: Tensor) -> bool:
        """Whether an operand may be summed here; many rows are better summed otherwise."""
        return (
            x.dtype is torch.bfloat16 and 0 < x.nbytes <= self.capacity and x.nbytes % _CHUNK == 0
        )

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over ranks, rounded after each, in their order.

        Args:
            x: that :meth:`takes` admits; of one shape on all ranks.
        """
        x = x.contiguous()
        out = torch.empty_like(x)
        chunks = x.nbytes // _CHUNK
        blocks = min(-(-chunks // _THREADS), _MOST_BLOCKS)
        kernel = all_reduce_kernel(len(self.addresses))
        kernel((blocks, 1, 1), _THREADS, x, out, chunks, *self.arguments())
        return out

    def arguments(self) -> Sequence[object]:
        """What kernels take of it."""
        missing = [Int64(0)] * (MOST_RANKS - len(self.addresses))
        return (
            self.rank,
            self.state,
            Int64(lines_of(self.capacity)),
            Int64(self.patience * 1e9),
            Int64(self.addresses[self.rank]),
            *map(Int64, self.addresses),
            *missing,
        )


def lines_of(nbytes: int) -> int:
    """Lines that carry so many bytes."""
    return nbytes // 8


@functools.cache
def all_reduce_kernel(ranks: int) -> CudaKernel:
    """The kernel for a number of ranks."""
    return CudaKernel("all_reduce.cu", "all_reduce", {"RANKS": ranks}, overlap=True)
