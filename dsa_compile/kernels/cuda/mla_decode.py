"""Sparse MLA decode on Hopper: latent attention to selected rows of the paged cache.

Made for few tokens and many heads; the keys of a token are split over blocks until the device is
full, and the parts are merged in the same launch. See ``src/mla_decode.cuh`` for the kernel.
"""

import functools
from collections.abc import Mapping
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

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """That a cache may have."""
        if self is Format.BF16:
            return (torch.bfloat16,)
        return (torch.uint8, torch.float8_e4m3fn)[: 1 if self is Format.FP8 else 2]


@dataclass(frozen=True)
class Split:
    """How the keys of a token are shared.

    Attributes:
        cluster: blocks that merge through shared memory, one of :data:`CLUSTERS`.
        groups: clusters that merge through device memory, at most 8.
    """

    cluster: int = 1
    groups: int = 1

    @property
    def blocks(self) -> int:
        """Blocks that share the keys."""
        return self.cluster * self.groups


CLUSTERS = (1, 2, 4, 8)
"""Sizes of clusters that are used."""
_SPLITS = (Split(1), Split(2), Split(4), Split(8), Split(8, 2), Split(8, 4))


def choose_split(units: int, tiles: int, resident: Mapping[int, int]) -> Split:
    """The split with the least estimated time.

    Args:
        units: tokens times groups of 64 heads.
        tiles: of 64 keys, of each.
        resident: clusters that the device holds at once, by their size: fewer than processors
            suggest, as a cluster does not reach beyond its group of processors.
    """

    def microseconds(split: Split) -> float:  # measured on an H200
        waves = -(-units * split.groups // resident[split.cluster])
        in_cluster = 1.0 + 0.1 * split.cluster if split.cluster > 1 else 0.0
        # over device memory: a round trip, and what the clusters write and read
        over_memory = 2.0 + 0.06 * units * split.groups if split.groups > 1 else 0.0
        return waves * (3.1 * -(-tiles // split.blocks) + 5.0 + in_cluster) + over_memory

    return min(
        (s for s in _SPLITS if s.blocks <= max(tiles, 1) and resident[s.cluster]), key=microseconds
    )


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


@functools.cache
def _split(form: Format, device: int, units: int, tiles: int) -> Split:
    probe = kernel(form, 1)  # the macro does not change what a block needs
    resident = {c: probe.resident_clusters(THREADS, (c, 1, 1)) for c in CLUSTERS if c > 1}
    resident[1] = torch.cuda.get_device_properties(device).multi_processor_count
    return choose_split(units, tiles, resident)


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
    out = torch.empty((tokens, heads, LATENT), dtype=torch.bfloat16, device=q_latent.device)
    lse = torch.empty((tokens, heads), dtype=torch.float32, device=q_latent.device)
    if tokens == 0:
        return out, lse
    if split is None:
        split = _split(form, q_latent.device.index, tokens * groups, -(-keys // KEYS))
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
    elif cache.dtype not in form.dtypes:
        problem = f"a cache in {form.dtypes[0]}, not {cache.dtype}"
    elif cache.dim() != 3 or cache.shape[2] != form.width or not cache.is_contiguous():
        problem = f"a contiguous cache [num_blocks, block_size, {form.width}]"
    elif any(x.data_ptr() % 16 for x in (q_latent, q_pe, cache)):
        problem = "queries and a cache that start at multiples of 16 bytes"
    elif slots.dtype is not torch.int32 or slots.shape[0] != tokens or slots.stride(1) != 1:
        problem = f"slots int32 [{tokens}, K] with contiguous rows"
    elif slots.shape[1] > MAX_KEYS:
        problem = f"up to {MAX_KEYS} slots a token, not {slots.shape[1]}"
    if problem:
        raise UserError(f"sparse MLA decode takes {problem}")


class _Counters:
    """Zeros at which blocks of a launch arrive; a launch leaves zeros behind.

    Launches on one stream follow one another and share theirs. Those of a captured graph may run
    beside anything, so each gets counters of its own: from a pool, or, where no launch outside a
    graph has made one or it is used up, cleared by the graph itself.
    """

    SIZE = 1 << 16

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.zeros(self.SIZE, dtype=torch.int32, device=device)
        self._used = 0
        self._of_stream: dict[int, Tensor] = {}

    def of_stream(self, count: int) -> Tensor:
        """Shared by what runs on the current stream."""
        stream = torch.cuda.current_stream().cuda_stream
        found = self._of_stream.get(stream)
        if found is None or found.shape[0] < count:
            found = self._of_stream[stream] = torch.zeros_like(self._pool[:count])
        return found

    def own(self, count: int) -> Tensor | None:
        """Never given out again, or None."""
        if self._used + count > self.SIZE:
            return None
        self._used += count
        return self._pool[self._used - count : self._used]


_COUNTERS: dict[torch.device, _Counters] = {}


def _counters(count: int, device: torch.device) -> Tensor:
    known = _COUNTERS.get(device)
    if torch.cuda.is_current_stream_capturing():
        own = known.own(count) if known else None
        return torch.zeros(count, dtype=torch.int32, device=device) if own is None else own
    if known is None:
        known = _COUNTERS[device] = _Counters(device)
    return known.of_stream(count)


def paged_latent_attention(
    q_latent: Tensor, q_pe: Tensor, cache: Tensor, slots: Tensor, scale: float
) -> Tensor:
    """``dsa::paged_latent_attention``; see :func:`attend`."""
    return attend(Format.BF16, q_latent, q_pe, cache, slots, scale)[0]


def paged_latent_attention_lse(
    q_latent: Tensor, q_pe: Tensor, cache: Tensor, slots: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """``dsa::paged_latent_attention_lse``; see :func:`attend`."""
    return attend(Format.BF16, q_latent, q_pe, cache, slots, scale)


def paged_latent_attention_fp8(
    q_latent: Tensor, q_pe: Tensor, cache: Tensor, slots: Tensor, scale: float
) -> Tensor:
    """``dsa::paged_latent_attention_fp8``; see :func:`attend`."""
    return attend(Format.FP8, q_latent, q_pe, cache, slots, scale)[0]


def paged_latent_attention_fp8_lse(
    q_latent: Tensor, q_pe: Tensor, cache: Tensor, slots: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """``dsa::paged_latent_attention_fp8_lse``; see :func:`attend`."""
    return attend(Format.FP8, q_latent, q_pe, cache, slots, scale)


def paged_latent_attention_fp8_tensor(
    q_latent: Tensor, q_pe: Tensor, cache: Tensor, slots: Tensor, scale: float, cache_scale: Tensor
) -> Tensor:
    """``dsa::paged_latent_attention_fp8_tensor``; see :func:`attend`."""
    return attend(Format.FP8_TENSOR, q_latent, q_pe, cache, slots, scale, cache_scale)[0]


def paged_latent_attention_fp8_tensor_lse(
    q_latent: Tensor, q_pe: Tensor, cache: Tensor, slots: Tensor, scale: float, cache_scale: Tensor
) -> tuple[Tensor, Tensor]:
    """``dsa::paged_latent_attention_fp8_tensor_lse``; see :func:`attend`."""
    return attend(Format.FP8_TENSOR, q_latent, q_pe, cache, slots, scale, cache_scale)
