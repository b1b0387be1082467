"""Communicators by which ranks exchange operands, by target."""

from typing import Protocol

import torch
from torch._C._distributed_c10d import Store

from dsa_compile.errors import UserError
from dsa_compile.facts.layout import Layout
from dsa_compile.ops.collectives import Communicator
from dsa_compile.runtime.engine_options import EngineOptions
from dsa_compile.runtime.ranks.gloo import GlooCommunicator


class GroupCommunicator(Communicator, Protocol):
    """A communicator whose collectives can be ended."""

    def abort(self) -> None:
        """End collectives that run or wait; doing so again does nothing."""
        ...

    def close(self) -> None:
        """Free memory that other ranks map, once none of them runs; again does nothing."""
        ...


def choose_device(target: str, rank: int, world: int) -> None:
    """Make a rank's GPU this process's current one: the one with its number.

    Raises:
        UserError: there are fewer GPUs than ranks.
    """
    if target == "cpu":
        return
    count = torch.cuda.device_count()
    if count < world:
        raise UserError(
            f"{world} ranks need {world} GPUs, and torch sees {count} here; compile for as many "
            "with --tp and --dp, or make more visible (CUDA_VISIBLE_DEVICES)"
        )
    torch.cuda.set_device(rank)


def connect(
    target: str, store: Store, rank: int, layout: Layout, options: EngineOptions
) -> GroupCommunicator:
    """Connect with the other ranks, which all do so now: gloo on a CPU, NCCL on GPUs.

    Args:
        target: of the artifact.
        store: the table of addresses.
        rank: of this process.
        layout: of all ranks.
        options: of loading: ``rank_timeout`` and ``collectives``.

    Raises:
        RuntimeError: the others do not come.
        UserError: as :class:`~dsa_compile.runtime.ranks.nccl.NcclCommunicator`.
    """
    if target == "cpu":
        return GlooCommunicator(store, rank, layout, options.rank_timeout)
    from dsa_compile.runtime.ranks.nccl import NcclCommunicator

    symmetric = options.collectives == "symmetric"
    return NcclCommunicator(store, rank, layout, options.rank_timeout, symmetric)
