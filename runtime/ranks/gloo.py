"""Collectives between processes of one machine, by gloo: for the CPU."""

import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store, TCPStore

from dsa_compile.facts.layout import DP, TP, Layout
from dsa_compile.ops.collectives import sum_of_ranks

HOST = "127.0.0.1"


def open_store(world: int, timeout: float) -> TCPStore:
    """Open the table of addresses, on a port that is free; for the first rank.

    It can be reached from this machine alone: by itself it would listen on all interfaces, and it
    asks nobody who they are.
    """
    listener = socket.create_server((HOST, 0))
    return TCPStore(
        HOST,
        listener.getsockname()[1],
        world,
        is_master=True,
        timeout=timedelta(seconds=timeout),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def join_store(port: int, world: int, timeout: float) -> TCPStore:
    """The table that the first rank has opened."""
    return TCPStore(HOST, port, world, is_master=False, timeout=timedelta(seconds=timeout))


class GlooCommunicator:
    """A :class:`~dsa_compile.ops.collectives.Communicator` over all ranks of a machine.

    Several may be in one process: torch's default process group is not used.

    Args:
        store: the table of addresses.
        rank: of this process.
        layout: of all ranks; each meets those of its lane and those at its place in other lanes.
        timeout: seconds to wait in a collective for the others.

    Raises:
        RuntimeError: the others do not come.
    """

    def __init__(self, store: Store, rank: int, layout: Layout, timeout: float) -> None:
        kind: Any = ProcessGroupGloo  # whose declared types lack what follows
        options = kind._Options()
        options._devices = [kind.create_device(hostname=HOST)]
        options._timeout = timedelta(seconds=timeout)
        self._layout, self._rank = layout, rank
        self._groups = {}
        for axis in (TP, DP):
            members = layout.group(axis, rank)
            if len(members) > 1:
                prefix = PrefixStore(f"{axis}/{members[0]}", store)
                place = members.index(rank)
                self._groups[axis] = kind(prefix, place, len(members), options)

    def peer_memory(self, axis: str) -> None:
        """Peer memory: None, as no kernel stores to the memory of another process."""

    def gather(self, x: Tensor, axis: str, ranks: int) -> Tensor:
        """Exchange operands: see :class:`~dsa_compile.ops.collectives.Communicator`."""
        assert ranks == self._layout.along(axis), (axis, ranks)
        x = x.contiguous()
        parts = x.new_empty((ranks, *x.shape))
        flat = [part.view(-1).view(torch.uint8) for part in parts]  # of any dtype
        self._groups[axis].allgather([flat], [x.view(-1).view(torch.uint8)]).wait()
        return parts

    def gather_many(self, xs: Sequence[Tensor], axis: str, ranks: int) -> list[Tensor]:
        """Exchange several operands, one after the other."""
        return [self.gather(x, axis, ranks) for x in xs]

    def all_reduce(self, x: Tensor, axis: str, ranks: int) -> Tensor:
        """Sum operands in the order of ranks."""
        return sum_of_ranks(self.gather(x, axis, ranks).unbind())

    def reduce_scatter(self, x: Tensor, axis: str, ranks: int) -> Tensor:
        """Sum operands in the order of ranks; this rank's rows of the sum."""
        own = self._layout.numbers(self._rank)[axis]
        return sum_of_ranks([part.chunk(ranks)[own] for part in self.gather(x, axis, ranks)])

    def abort(self) -> None:
        """Do nothing: the processes of other ranks end what waits for them."""

    def close(self) -> None:
        """Do nothing: ranks share no memory."""
