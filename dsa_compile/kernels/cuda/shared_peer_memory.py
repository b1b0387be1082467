"""Memory that all GPUs of a machine can store to."""

import os
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from dsa_compile.errors import UserError
from dsa_compile.kernels.cuda.descriptors import close_descriptors, exchange_descriptors
from dsa_compile.kernels.cuda.peer_memory import (
    MOST_RANKS,
    PeerMemory,
    all_gather_kernel,
    all_reduce_kernel,
    all_reduce_two_shot_kernel,
    peer_bytes,
    peer_memories,
    reduce_scatter_kernel,
)
from dsa_compile.kernels.cuda.shared_buffer import SharedBuffer
from dsa_compile.kernels.peer_limits import CAPACITY


def shared_peer_memories(
    store: Store, rank: int, world: int, groups: Mapping[str, Sequence[int]], patience: float
) -> dict[str, PeerMemory]:
    """Make buffers on each GPU of torch's default process group; all ranks do so together.

    torch's own symmetric memory is not used: its ranks number their meetings by process, so that
    one that has met others before waits for new ones for ever (torch 2.11 to 2.13).

    Args:
        store: by which the ranks find each other.
        rank: of this process.
        world: how many there are.
        groups: as of :func:`~dsa_compile.kernels.cuda.peer_memory.peer_memories`.
        patience: seconds to wait for another rank, here and in a kernel.

    Returns:
        For each group buffers and a count of calls of its own. Their common owner is to be closed
        when no rank uses them any more; nothing else frees them.

    Raises:
        UserError: there are too many ranks, or one does not come, or their GPUs do not reach each
            other's memory.
    """
    most = max(map(len, groups.values()))
    if most > MOST_RANKS:
        raise UserError(
            f"symmetric collectives with {most} ranks: they are for at most {MOST_RANKS}; "
            "load with collectives='nccl'"
        )
    device = torch.device("cuda", torch.cuda.current_device())
    try:
        buffer = SharedBuffer(peer_bytes(groups, CAPACITY))
        try:
            buffers = _mapped(buffer, store, rank, world, patience)
        except UserError:
            buffer.close()
            raise
    except UserError as error:
        raise UserError(f"symmetric collectives: {error}; load with collectives='nccl'") from None
    states = torch.zeros(len(groups), 2, dtype=torch.int32, device=device)
    for count in {len(ranks) for ranks in groups.values()}:
        for kernel in (all_reduce_kernel, all_gather_kernel, reduce_scatter_kernel):
            kernel(count).warm()
        if count > 2:  # two never sum in two shots
            all_reduce_two_shot_kernel(count).warm()
    torch.cuda.synchronize()
    dist.barrier()  # nobody stores before all have mapped the zeros
    torch.cuda.synchronize()
    return peer_memories(rank, groups, buffers, states, CAPACITY, patience, buffer)


def _mapped(
    buffer: SharedBuffer, store: Store, rank: int, world: int, patience: float
) -> list[int]:
    """Addresses of all ranks' buffers in this process, by rank."""
    own = buffer.descriptor()
    try:
        theirs = exchange_descriptors(store, rank, world, own, patience)
    finally:
        os.close(own)
    left = iter(theirs)
    try:
        return [buffer.address if other is None else buffer.map(other) for other in left]
    except UserError:
        close_descriptors(left)  # the one that could not be mapped is closed
        raise
