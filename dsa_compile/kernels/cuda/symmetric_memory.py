"""Memory that all GPUs of a machine can store to, by torch's symmetric memory; no multicast."""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch.distributed import _symmetric_memory as symmetric_memory

from dsa_compile.errors import UserError
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
from dsa_compile.kernels.peer_limits import CAPACITY


def shared_peer_memories(
    rank: int, groups: Mapping[str, Sequence[int]], patience: float
) -> dict[str, PeerMemory]:
    """Make buffers on each GPU of torch's default process group; all ranks do so together.

    Args:
        rank: of this process.
        groups: as of :func:`~dsa_compile.kernels.cuda.peer_memory.peer_memories`.
        patience: seconds that a kernel waits for a peer.

    Returns:
        For each group buffers and a count of calls of its own.

    Raises:
        UserError: there are too many ranks, or their GPUs do not reach each other's memory.
    """
    most = max(map(len, groups.values()))
    if most > MOST_RANKS:
        raise UserError(
            f"symmetric collectives with {most} ranks: they are for at most {MOST_RANKS}; "
            "load with collectives='nccl'"
        )
    device = torch.device("cuda", torch.cuda.current_device())
    try:
        size = peer_bytes(groups, CAPACITY)
        buffer = symmetric_memory.empty(size, dtype=torch.uint8, device=device)
        handle = symmetric_memory.rendezvous(buffer, dist.group.WORLD)  # type: ignore[arg-type]
    except RuntimeError as error:
        raise UserError(
            "symmetric collectives: the GPUs cannot store to each other's memory: "
            f"{str(error).partition(chr(10))[0]}; load with collectives='nccl'"
        ) from None
    buffer.zero_()
    states = torch.zeros(len(groups), 2, dtype=torch.int32, device=device)
    for count in {len(ranks) for ranks in groups.values()}:
        for kernel in (all_reduce_kernel, all_gather_kernel, reduce_scatter_kernel):
            kernel(count).warm()
        if count > 2:  # two never sum in two shots
            all_reduce_two_shot_kernel(count).warm()
    torch.cuda.synchronize()
    dist.barrier()  # nobody stores before all are zero
    torch.cuda.synchronize()
    buffers = [int(pointer) for pointer in handle.buffer_ptrs]
    return peer_memories(rank, groups, buffers, states, CAPACITY, patience, (buffer, handle))
