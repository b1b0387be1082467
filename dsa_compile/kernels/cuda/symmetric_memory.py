"""Memory that all GPUs of a machine can store to, by torch's symmetric memory; no multicast."""

import torch
import torch.distributed as dist
from torch.distributed import _symmetric_memory as symmetric_memory

from dsa_compile.errors import UserError
from dsa_compile.kernels.cuda.peer_memory import MOST_RANKS, PeerMemory, all_reduce_kernel

CAPACITY = 1 << 20
"""Bytes of the largest operand summed here: 73 rows of 7,168 values. NCCL is as fast beyond."""


def shared_peer_memory(rank: int, ranks: int, patience: float) -> PeerMemory:
    """Make a buffer on each GPU of torch's default process group; all ranks do so together.

    Args:
        rank: of this process.
        ranks: how many there are.
        patience: seconds that a kernel waits for a peer.

    Raises:
        UserError: there are too many ranks, or their GPUs do not reach each other's memory.
    """
    if ranks > MOST_RANKS:
        raise UserError(
            f"symmetric collectives with {ranks} ranks: they sum over at most {MOST_RANKS}; "
            "load with collectives='nccl'"
        )
    device = torch.device("cuda", torch.cuda.current_device())
    size = PeerMemory.nbytes(ranks, CAPACITY)
    try:
        buffer = symmetric_memory.empty(size, dtype=torch.uint8, device=device)
        handle = symmetric_memory.rendezvous(buffer, dist.group.WORLD)  # type: ignore[arg-type]
    except RuntimeError as error:
        raise UserError(
            "symmetric collectives: the GPUs cannot store to each other's memory: "
            f"{str(error).partition(chr(10))[0]}; load with collectives='nccl'"
        ) from None
    buffer.zero_()
    state = torch.zeros(2, dtype=torch.int32, device=device)
    all_reduce_kernel(ranks).warm()
    torch.cuda.synchronize()
    dist.barrier()  # nobody stores before all are zero
    torch.cuda.synchronize()
    addresses = tuple(int(pointer) for pointer in handle.buffer_ptrs)
    return PeerMemory(rank, addresses, state, CAPACITY, patience, (buffer, handle))
