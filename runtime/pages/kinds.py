"""Paged caches of an artifact: which calls own them, their bytes a block, and their memory."""

from collections.abc import Mapping

import torch
from torch import Tensor

from dsa_compile.artifact.manifest import Manifest
from dsa_compile.artifact.records import CacheRecord
from dsa_compile.errors import OptionValueError

GIB = 2**30

Caches = Mapping[str, Mapping[str, Tensor]]
"""Caches by key, for each call that owns some, by its name."""


def page_bytes(manifest: Manifest, *, shared: bool = False) -> int:
    """Bytes of one block in all caches that :func:`make_caches` makes."""
    owners = manifest.cache_owners.values()
    rows = sum(
        cache.width * getattr(torch, cache.dtype).itemsize
        for caches in (dict.fromkeys(owners) if shared else owners)
        for cache in caches
    )
    return int(rows) * manifest.block_size


def make_caches(
    manifest: Manifest, num_blocks: int, device: torch.device, *, shared: bool = False
) -> Caches:
    """The caches of every call that owns some, ``[num_blocks, block_size, width]`` each.

    Args:
        manifest: of the artifact.
        num_blocks: blocks of each cache.
        device: where.
        shared: let all calls of a kind have the same caches, to measure steps in little memory.

    Raises:
        UserError: no memory for them.
    """
    owners = manifest.cache_owners
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None
    made: dict[tuple[CacheRecord, ...] | str, dict[str, Tensor]] = {}
    try:
        for owner, caches in owners.items():
            key = caches if shared else owner
            if key not in made:
                made[key] = {c.key: _cache(c, num_blocks, manifest, device) for c in caches}
    except RuntimeError:  # what torch raises when the system refuses the memory
        needed = num_blocks * page_bytes(manifest)
        room, none = "", "none"
        if free is not None:
            none = "none and a lower {gpu_memory_utilization}"
            most = int(free / needed * num_blocks)
            room = f" and the GPU had {free / GIB:.1f} free (for {most} blocks at the most)"
        keys = dict.fromkeys(cache.key for caches in owners.values() for cache in caches)
        raise OptionValueError(
            f"{{num_gpu_blocks_override}}={num_blocks}: no memory for the caches "
            f"({', '.join(keys)}), which need {needed / GIB:.1f} GiB in {len(owners)} layers"
            f"{room}; give a smaller number, or {none}"
        ) from None
    return {owner: made[caches if shared else owner] for owner, caches in owners.items()}


def _cache(cache: CacheRecord, num_blocks: int, manifest: Manifest, device: torch.device) -> Tensor:
    shape = (num_blocks, manifest.block_size, cache.width)
    return torch.zeros(shape, dtype=getattr(torch, cache.dtype), device=device)
