"""Sparse MLA decode on Hopper: latent attention to selected rows of the paged cache.

Made for few tokens and many heads; the keys of a token are split over blocks until the device is
full, and the parts are merged in the same launch. See ``src/mla_decode.cuh`` for the kernel.
"""

import functools
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from dsa_compile.errors import UserError
from dsa_compile.kernels.cuda.launch import CudaKernel

LATENT, ROPE = 512, 64
HEADS = 64
"""Heads of one block."""
KEYS = 64
"""Keys of one tile."""
THREADS = 384
SHARED = 231_808
"""Bytes of ``struct Shared``."""
MAX_KEYS = 4096


class Format(IntEnum):
    """Rows of the cache, by the numbers the kernel knows them by."""

    FP8 = 0
    FP8_TENSOR = 1
    BF16 = 2

    @property
    def width(self) -> int:
        """Of a row, in elements of the cache."""
        return 656 if self is Format.FP8 else LATENT + ROPE


@dataclass(frozen=True)
class Split:
    """How the keys of a token are shared.

    Attributes:
        cluster: blocks that merge through shared memory: 1, 2, 4 or 8.
        groups: clusters that merge through device memory, at most 8.
    """

    cluster: int = 1
    groups: int = 1

    @property
    def blocks(self) -> int:
        """Blocks that share the keys."""
        return self.cluster * self.groups


_SPLITS = tuple(Split(c, g) for c, g in ((1, 1), (2, 1), (4, 1), (8, 1), (8, 2), (8, 4), (8, 8)))


def choose_split(units: int, tiles: int, processors: int) -> Split:
    """The split with the least estimated time.

    Args:
        units: tokens times groups of 64 heads.
        tiles: of 64 keys, of each.
        processors: of the device; each holds one block.
    """

    def cost(split: Split) -> float:
        # in tiles: what a block does around its tiles, and what merging costs
        waves = -(-units * split.blocks // (processors // split.cluster * split.cluster))
        merging = (0.0 if split.cluster == 1 else 2.0) + (0.0 if split.groups == 1 else 1.5)
        return waves * (-(-tiles // split.blocks) + 3.0 + merging)

    return min((s for s in _SPLITS if s.blocks <= max(tiles, 1)), key=cost)


@functools.cache
def kernel(form: Format, cluster: int) -> CudaKernel:
    """The kernel of a row format and a cluster size."""
    return CudaKernel(
        "mla_decode.cu",
        "mla_decode",
        {"FORMAT": int(form), "CLUSTER": cluster},
        shared=SHARED,
        cluster=(cluster, 1, 1),
    )


def attend(
    form: Format,
    q_latent: Tensor,
    q_pe: Tensor,
    cache: Tensor,
    slots: Tensor,
    scale: float,
    cache_scale: Tensor | None = None,
    split: Split | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of every token to its rows.

    Args:
        form: what ``cache`` holds.
        q_latent: bf16 ``[T, H, 512]``, rows contiguous.
        q_pe: bf16 ``[T, H, 64]``, rows contiguous.
        cache: ``[num_blocks, block_size, W]``.
        slots: int32 ``[T, K]``; whatever is outside the cache is absent.
        scale: on the dot products.
        cache_scale: fp32 ``[1]`` of per-tensor FP8.
        split: instead of the one that is estimated to be fastest.

    Returns:
        bf16 ``[T, H, 512]``, and fp32 ``[T, H]``: the natural logarithm of the sum of exponentials.

    Raises:
        UserError: the kernel does not take such input.
    """
    _check(form, q_latent, q_pe, cache, slots)
    tokens, heads = q_latent.shape[:2]
    keys = slots.shape[1]
    groups = -(-heads // HEADS)
    if split is None:
        tiles = -(-keys // KEYS)
        split = choose_split(tokens * groups, tiles, _processors(q_latent.device.index))
    out = torch.empty((tokens, heads, LATENT), dtype=torch.bfloat16, device=q_latent.device)
    lse = torch.empty((tokens, heads), dtype=torch.float32, device=q_latent.device)
    partial = sums = arrivals = None
    if split.groups > 1:
        parts = tokens * groups * split.groups * HEADS
        partial = torch.empty(parts * LATENT, dtype=torch.float32, device=q_latent.device)
        sums = torch.empty(parts * 2, dtype=torch.float32, device=q_latent.device)
        arrivals = _counters(tokens * groups * split.cluster, q_latent.device)
    kernel(form, split.cluster)(
        (split.blocks, groups, tokens),
        THREADS,
        q_latent,
        q_pe,
        cache,
        slots,
        cache_scale,
        out,
        lse,
        heads,
        keys,
        cache.shape[0] * cache.shape[1],
        slots.stride(0),
        q_latent.stride(0),
        q_latent.stride(1),
        q_pe.stride(0),
        q_pe.stride(1),
        float(scale),
        partial,
        sums,
        arrivals,
    )
    return out, lse


def _check(form: Format, q_latent: Tensor, q_pe: Tensor, cache: Tensor, slots: Tensor) -> None:
    tokens, heads = q_latent.shape[:2]
    problem = None
    if q_latent.dtype is not torch.bfloat16 or q_pe.dtype is not torch.bfloat16:
        problem = f"queries in bfloat16, not {q_latent.dtype} and {q_pe.dtype}"
    elif q_latent.shape[2] != LATENT or q_pe.shape != (tokens, heads, ROPE):
        problem = (
            f"q_latent [T, H, {LATENT}] and q_pe [T, H, {ROPE}], "
            f"not {list(q_latent.shape)} and {list(q_pe.shape)}"
        )
    elif any(x.stride(2) != 1 or x.stride(0) % 8 or x.stride(1) % 8 for x in (q_latent, q_pe)):
        problem = "queries with contiguous rows at multiples of 16 bytes"
    elif cache.dim() != 3 or cache.shape[2] != form.width or not cache.is_contiguous():
        problem = f"a contiguous cache [num_blocks, block_size, {form.width}]"
    elif slots.dtype is not torch.int32 or slots.shape[0] != tokens or slots.stride(1) != 1:
        problem = f"slots int32 [{tokens}, K] with contiguous rows"
    elif slots.shape[1] > MAX_KEYS:
        problem = f"up to {MAX_KEYS} slots a token, not {slots.shape[1]}"
    if problem:
        raise UserError(f"sparse MLA decode takes {problem}")


@functools.cache
def _processors(device: int) -> int:
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


_COUNTERS: dict[torch.device, Tensor] = {}


def _counters(count: int, device: torch.device) -> Tensor:
    if device not in _COUNTERS:
        _COUNTERS[device] = torch.zeros(1 << 16, dtype=torch.int32, device=device)
    return _COUNTERS[device][:count]
