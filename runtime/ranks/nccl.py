"""Collectives between GPUs of one machine, by NCCL."""

import os
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import distributed_c10d

from dsa_compile.errors import UserError
from dsa_compile.facts.layout import DP, TP, Layout
from dsa_compile.kernels.cuda.peer_memory import PeerMemory
from dsa_compile.kernels.cuda.shared_peer_memory import shared_peer_memories

_CLEAN_UP_ONLY = "2"


class NcclCommunicator:
    """A :class:`~dsa_compile.ops.collectives.Communicator` over all ranks of a machine.

    It is torch's default process group. Collectives run on the current stream and may be captured
    in CUDA graphs.

    Args:
        store: the table of addresses.
        rank: of this process, whose current device is the rank's.
        layout: of all ranks; each meets those of its lane and those at its place in other lanes.
        timeout: seconds that a collective outside of graphs waits for the others.
        symmetric: exchange and sum few rows by kernels of our own, through memory that all ranks
            store to.

    Raises:
        UserError: this process has a default process group already; or as
            :func:`~dsa_compile.kernels.cuda.shared_peer_memory.shared_peer_memories`.
    """

    def __init__(
        self, store: Store, rank: int, layout: Layout, timeout: float, symmetric: bool
    ) -> None:
        if dist.is_initialized():
            raise UserError(
                "this process has a torch.distributed process group already; load an artifact of "
                "several ranks in a process of its own, or end the other group before"
            )
        # Collectives that wait too long are ended, and not the process, which has an error to tell.
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = _CLEAN_UP_ONLY
        self._layout = layout
        dist.init_process_group(
            "nccl",
            store=PrefixStore("nccl", store),
            rank=rank,
            world_size=layout.world,
            timeout=timedelta(seconds=timeout),
            device_id=torch.device("cuda", torch.cuda.current_device()),
        )
        self._memories: dict[str, PeerMemory] = {}
        if symmetric:
            met = {axis: layout.group(axis, rank) for axis in (TP, DP) if layout.along(axis) > 1}
            self._memories = shared_peer_memories(store, rank, layout.world, met, timeout)
        self._groups = {axis: self._group(axis, rank) for axis in (TP, DP)}

    def _group(self, axis: str, rank: int) -> dist.ProcessGroup | None:
        """Group of this rank along an axis, None for that of all ranks; every rank makes all."""
        found = None
        members = {self._layout.group(axis, each) for each in range(self._layout.world)}
        if len(members) == 1:
            return None
        for ranks in sorted(members):
            made = dist.new_group(list(ranks)) if len(ranks) > 1 else None
            found = made if rank in ranks else found
        return found

    def peer_memory(self, axis: str) -> PeerMemory | None:
        """Peer memory by which kernels store to the memory of the ranks along an axis, or None."""
        return self._memories.get(axis)

    def gather(self, x: Tensor, axis: str, ranks: int) -> Tensor:
        """Exchange operands: see :class:`~dsa_compile.ops.collectives.Communicator`."""
        assert ranks == self._layout.along(axis), (axis, ranks)
        memory = self.peer_memory(axis)
        if memory is not None and memory.gathers((x,)):
            return memory.all_gather((x,))[0]
        return self._gather(x, ranks, self._groups[axis])

    def _gather(self, x: Tensor, ranks: int, group: dist.ProcessGroup | None) -> Tensor:
        x = x.contiguous()
        parts = torch.empty((ranks, *x.shape), dtype=x.dtype, device=x.device)
        if x.numel():
            flat = parts.view(-1).view(torch.uint8)  # of any dtype
            dist.all_gather_into_tensor(flat, x.view(-1).view(torch.uint8), group=group)
        return parts

    def gather_many(self, xs: Sequence[Tensor], axis: str, ranks: int) -> list[Tensor]:
        """Exchange several operands, by NCCL as one group of calls, which it launches together."""
        memory = self.peer_memory(axis)
        if memory is not None and memory.gathers(xs):
            return memory.all_gather(xs)
        group = self._groups[axis]
        with distributed_c10d._coalescing_manager(group):
            return [self._gather(x, ranks, group) for x in xs]

    def all_reduce(self, x: Tensor, axis: str, ranks: int) -> Tensor:
        """Sum operands; by NCCL, more than two in an order of its own, the same on all ranks."""
        assert ranks == self._layout.along(axis), (axis, ranks)
        memory = self.peer_memory(axis)
        if memory is not None and memory.takes(x):
            return memory.all_reduce(x)
        total = x.clone(memory_format=torch.contiguous_format)
        if total.numel():
            dist.all_reduce(total, group=self._groups[axis])
        return total

    def reduce_scatter(self, x: Tensor, axis: str, ranks: int) -> Tensor:
        """Sum operands, and give each rank its rows; by NCCL in an order of its own."""
        assert ranks == self._layout.along(axis), (axis, ranks)
        memory = self.peer_memory(axis)
        if memory is not None and memory.scatters(x):
            return memory.reduce_scatter(x)
        x = x.contiguous()
        own = x.new_empty((x.shape[0] // ranks, *x.shape[1:]))
        if own.numel():
            dist.reduce_scatter_tensor(own, x, group=self._groups[axis])
        return own

    def abort(self) -> None:
        """End collectives that run or wait, and the group; doing so again does nothing."""
        if dist.is_initialized():
            distributed_c10d._abort_process_group()

    def close(self) -> None:
        """Free memory that other ranks map, once none of them runs; again does nothing."""
        for memory in self._memories.values():
            if memory.owner is not None:
                memory.owner.close()
