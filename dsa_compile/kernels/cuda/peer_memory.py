"""Memory of all ranks that each of them can store to, and collectives through it.

See ``src/all_reduce.cuh`` for how they work.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dsa_compile.kernels.cuda.launch import CudaKernel, Int64
from dsa_compile.kernels.cuda.shared_buffer import SharedBuffer
from dsa_compile.kernels.peer_limits import most_summed, norms_with_sum, two_shots

MOST_RANKS = 8
MOST_OPERANDS = 4
"""Operands that one all-gather takes: e4m3 tokens, their scales, weights and choices."""

_LINE, _CHUNK = 16, 16  # bytes; a line carries 8 of data
_THREADS = 64
"""Threads of a block: few, as then a few rows come from many multiprocessors."""
_MOST_BLOCKS = 1056


@dataclass(frozen=True)
class PeerMemory:
    """Buffers for collectives, one in the memory of each rank, and zeros before the first.

    All ranks call the same collectives in the same order, with operands of the same shapes.

    Attributes:
        rank: the number of this process among those that meet here.
        addresses: where this process finds the buffer of each rank, ``nbytes`` long.
        state: int32 ``[2]`` on this rank's GPU, zeros.
        capacity: bytes that a rank may have for another one in a call, a multiple of 16.
        patience: seconds after which a kernel that waits for a peer ends the use of the GPU.
        owner: this rank's buffer; the addresses are valid until it is closed.
    """

    rank: int
    addresses: tuple[int, ...]
    state: Tensor
    capacity: int
    patience: float
    owner: SharedBuffer | None = None

    @staticmethod
    def nbytes(ranks: int, capacity: int) -> int:
        """Bytes of a rank's buffer."""
        return 2 * ranks * lines_of(capacity) * _LINE

    def takes(self, x: Tensor) -> bool:
        """Whether an operand may be summed here; many rows are better summed by NCCL."""
        ranks = len(self.addresses)
        if x.nbytes > most_summed(ranks):
            return False
        if two_shots(ranks, x.nbytes):
            return self.takes_in_two_shots(x)
        return self.takes_in_one_shot(x)

    def takes_in_one_shot(self, x: Tensor) -> bool:
        """Whether :meth:`all_reduce_in_one_shot` can sum an operand."""
        return _summable(x, _CHUNK, self.capacity)

    def takes_in_two_shots(self, x: Tensor) -> bool:
        """Whether :meth:`all_reduce_in_two_shots` can sum an operand."""
        ranks = len(self.addresses)
        return _summable(x, _CHUNK * ranks, self.capacity * ranks // 2)

    def norms(self, x: Tensor) -> bool:
        """Whether an operand may be summed here and normed by the same kernel."""
        return norms_with_sum(len(self.addresses), x.nbytes) and self.takes_in_one_shot(x)

    def gathers(self, xs: Sequence[Tensor]) -> bool:
        """Whether operands, of any dtypes and sizes, may be gathered here in one call."""
        return len(xs) <= MOST_OPERANDS and 0 < _CHUNK * _chunks_of(xs) <= self.capacity

    def scatters(self, x: Tensor) -> bool:
        """Whether an operand may be summed here and shared out by rows."""
        ranks = len(self.addresses)
        return (
            x.dtype is torch.bfloat16
            and 0 < x.nbytes <= ranks * self.capacity
            and x.shape[0] % ranks == 0
            and x.nbytes % (ranks * _CHUNK) == 0
        )

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over ranks, rounded after each, in their order.

        Args:
            x: that :meth:`takes` admits; of one shape on all ranks.
        """
        if two_shots(len(self.addresses), x.nbytes):
            return self.all_reduce_in_two_shots(x)
        return self.all_reduce_in_one_shot(x)

    def all_reduce_in_one_shot(self, x: Tensor) -> Tensor:
        """Sum as :meth:`all_reduce`, where each rank sends its operand to all others.

        Args:
            x: that :meth:`takes_in_one_shot` admits: bf16, whole chunks of 16 bytes, ``capacity``
                bytes at most.
        """
        x = _whole_chunks(x)
        out = torch.empty_like(x)
        chunks = x.nbytes // _CHUNK
        kernel = all_reduce_kernel(len(self.addresses))
        kernel(_grid(chunks), _THREADS, x, out, chunks, *self.arguments())
        return out

    def all_reduce_in_two_shots(self, x: Tensor) -> Tensor:
        """Sum as :meth:`all_reduce`, where each rank sums a share and sends the sum to all others.

        Args:
            x: that :meth:`takes_in_two_shots` admits: bf16, a multiple of ``ranks`` chunks of 16
                bytes, ``capacity * ranks // 2`` bytes at most.
        """
        ranks = len(self.addresses)
        x = _whole_chunks(x)
        out = torch.empty_like(x)
        chunks = x.nbytes // _CHUNK
        kernel = all_reduce_two_shot_kernel(ranks)
        kernel(_grid(chunks // ranks), _THREADS, x, out, chunks, *self.arguments())
        return out

    def all_gather(self, xs: Sequence[Tensor]) -> list[Tensor]:
        """The operands of all ranks, by one kernel.

        Args:
            xs: that :meth:`gathers` admits; each of one shape and dtype on all ranks.

        Returns:
            For each ``[ranks, *x.shape]``, contiguous, in the order of ranks.
        """
        ranks = len(self.addresses)
        xs = [x.contiguous() for x in xs]
        parts = [torch.empty((ranks, *x.shape), dtype=x.dtype, device=x.device) for x in xs]
        missing = MOST_OPERANDS - len(xs)
        nothing: list[None] = [None] * missing
        sizes = [x.nbytes for x in xs] + [0] * missing
        operands = (*xs, *nothing, *parts, *nothing, *sizes)
        chunks = _chunks_of(xs)
        kernel = all_gather_kernel(ranks)
        kernel(_grid(chunks), _THREADS, *operands, chunks, *self.arguments())
        return parts

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """This rank's rows of the sum over ranks, rounded after each, in their order.

        Args:
            x: ``[ranks * T, ...]`` that :meth:`scatters` admits; of one shape on all ranks.

        Returns:
            ``[T, ...]``.
        """
        ranks = len(self.addresses)
        x = _whole_chunks(x)
        out = x.new_empty((x.shape[0] // ranks, *x.shape[1:]))
        chunks = out.nbytes // _CHUNK
        kernel = reduce_scatter_kernel(ranks)
        kernel(_grid(chunks), _THREADS, x, out, chunks, *self.arguments())
        return out

    def arguments(self) -> Sequence[object]:
        """Arguments by which kernels take this memory."""
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


def peer_memories(
    rank: int,
    groups: Mapping[str, Sequence[int]],
    buffers: Sequence[int],
    states: Tensor,
    capacity: int,
    patience: float,
    owner: SharedBuffer | None = None,
) -> dict[str, PeerMemory]:
    """Divide one buffer a rank between groups that count their calls by themselves.

    Args:
        rank: of this process.
        groups: by name the ranks that this one meets, itself among them, in order; on all ranks of
            the same names and lengths, in the same order.
        buffers: the address of every rank's, of :func:`peer_bytes`, zeros.
        states: int32 ``[groups, 2]`` on this rank's GPU, zeros.
        capacity: as of :class:`PeerMemory`; so are ``patience`` and ``owner``.
    """
    made, begin = {}, 0
    for (name, members), state in zip(groups.items(), states, strict=True):
        addresses = tuple(buffers[member] + begin for member in members)
        place = list(members).index(rank)
        made[name] = PeerMemory(place, addresses, state, capacity, patience, owner)
        begin += PeerMemory.nbytes(len(members), capacity)
    return made


def peer_bytes(groups: Mapping[str, Sequence[int]], capacity: int) -> int:
    """Bytes of a rank's buffer for several groups."""
    return sum(PeerMemory.nbytes(len(members), capacity) for members in groups.values())


def lines_of(nbytes: int) -> int:
    """Lines that carry so many bytes."""
    return nbytes // 8


def _chunks_of(xs: Sequence[Tensor]) -> int:
    """Chunks of operands that begin with one each."""
    return sum(-(-x.nbytes // _CHUNK) for x in xs)


def _summable(x: Tensor, unit: int, most: int) -> bool:
    return x.dtype is torch.bfloat16 and 0 < x.nbytes <= most and x.nbytes % unit == 0


def _whole_chunks(x: Tensor) -> Tensor:
    """Operand, contiguous and where 16 bytes can be loaded at once; copied if it must be."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % _CHUNK else x


def _grid(chunks: int) -> tuple[int, int, int]:
    return min(-(-chunks // _THREADS), _MOST_BLOCKS), 1, 1


@functools.cache
def all_reduce_kernel(ranks: int) -> CudaKernel:
    """The kernel for a number of ranks."""
    return CudaKernel("all_reduce.cu", "all_reduce", {"RANKS": ranks}, overlap=True)


@functools.cache
def all_reduce_two_shot_kernel(ranks: int) -> CudaKernel:
    """The kernel for a number of ranks."""
    return CudaKernel(
        "all_reduce_two_shot.cu", "all_reduce_two_shot", {"RANKS": ranks}, overlap=True
    )


@functools.cache
def all_gather_kernel(ranks: int) -> CudaKernel:
    """The kernel for a number of ranks."""
    return CudaKernel("all_gather.cu", "all_gather", {"RANKS": ranks}, overlap=True)


@functools.cache
def reduce_scatter_kernel(ranks: int) -> CudaKernel:
    """The kernel for a number of ranks."""
    return CudaKernel("reduce_scatter.cu", "reduce_scatter", {"RANKS": ranks}, overlap=True)
