"""Sparse MLA decode on Hopper: latent attention to selected rows of the paged cache.

Made for few tokens and many heads; the keys of a token are split over blocks until the device is
full, and a second kernel merges the parts. See ``src/mla_decode.cuh``.
"""

import functools
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from dsa_compile.errors import UserError
from dsa_compile.kernels.cuda.device import multiprocessors
from dsa_compile.kernels.cuda.launch import CudaKernel

LATENT, ROPE = 512, 64
HEADS = 64
"""Heads of one block."""
THREADS = 384
SHARED = 232_192
"""Bytes of ``struct Shared``."""
MERGE_THREADS = 256
MAX_KEYS = 4096
MAX_SPLITS = 64
"""Parts that the kernel can merge."""


class Format(IntEnum):
    """Rows of the cache, by the numbers the kernel knows them by."""

    FP8 = 0
    FP8_TENSOR = 1
    BF16 = 2

    @property
    def width(self) -> int:
        """Width of a row, in elements of the cache."""
        return 656 if self is Format.FP8 else LATENT + ROPE

    @property
    def tile(self) -> int:
        """Keys that the kernel takes at a time."""
        return 64 if self is Format.BF16 else 48

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """Dtypes that a cache may have."""
        if self is Format.BF16:
            return (torch.bfloat16,)
        return (torch.uint8, torch.float8_e4m3fn)[: 1 if self is Format.FP8 else 2]


@dataclass(frozen=True)
class Parts:
    """Parts of attention whose keys several blocks shared; see ``src/mla_decode_part.cuh``.

    Attributes:
        values: fp32 for rows of bf16, else fp16, ``[T * groups * splits * 64, 512]``.
        sums: fp32 ``[T * groups * splits * 64, 2]``, maximum and sum of exponentials of each.
    """

    values: Tensor
    sums: Tensor


def choose_splits(units: int, tiles: int, processors: int) -> int:
    """Blocks that share the keys of a token: those with the least estimated time.

    Args:
        units: tokens times groups of 64 heads.
        tiles: of each.
        processors: of the device; each runs one block at a time.
    """

    def microseconds(splits: int) -> float:  # measured on an H200
        waves = -(-units * splits // processors)
        merge = 1.5 + 0.03 * units * splits if splits > 1 else 0.0
        return waves * (2.0 * -(-tiles // splits) + 9.5) + merge

    return min(range(1, max(min(tiles, MAX_SPLITS), 1) + 1), key=microseconds)


_splits = functools.cache(choose_splits)


@functools.cache
def kernel(form: Format) -> CudaKernel:
    """The kernel of a row format."""
    return CudaKernel(
        "mla_decode.cu", "mla_decode", {"FORMAT": int(form)}, shared=SHARED, overlap=True
    )


@functools.cache
def merge_kernel(form: Format, parts: int) -> CudaKernel:
    """The kernel that adds up what several blocks made of their keys.

    Args:
        form: of the rows.
        parts: threads that share the parts of a row's column.
    """
    defines = {"FORMAT": int(form), "PARTS": parts}
    return CudaKernel("mla_decode_merge.cu", "mla_decode_merge", defines, overlap=True)


def attend(
    form: Format,
    q_latent: Tensor,
    q_pe: Tensor,
    cache: Tensor,
    slots: Tensor,
    scale: float,
    cache_scale: Tensor | None = None,
    splits: int | None = None,
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
        splits: blocks that share the keys of a token, instead of those of :func:`choose_splits`.

    Returns:
        bf16 ``[T, H, 512]``, and fp32 ``[T, H]``: the natural logarithm of the sum of exponentials.

    Raises:
        UserError: the kernel does not take such input.
    """
    check(form, q_latent, q_pe, cache, slots)
    tokens, heads = q_latent.shape[:2]
    out = torch.empty((tokens, heads, LATENT), dtype=torch.bfloat16, device=q_latent.device)
    lse = torch.empty((tokens, heads), dtype=torch.float32, device=q_latent.device)
    if tokens == 0:
        return out, lse
    splits = splits or splits_for(form, q_latent, slots)
    parts = empty_parts(form, q_latent, splits) if splits > 1 else None
    _launch(form, q_latent, q_pe, cache, slots, scale, cache_scale, splits, (out, lse), parts)
    if parts:
        # so many threads a row that each has at most a dozen parts, which it loads at once
        sharing = 1 if splits <= 12 else 2 if splits <= 24 or form is Format.BF16 else 4
        row_threads = LATENT * parts.values.element_size() // 16 * sharing
        grid = (-(-heads * row_threads // MERGE_THREADS), tokens, 1)
        merge_kernel(form, sharing)(
            grid, MERGE_THREADS, parts.values, parts.sums, cache_scale, out, lse, heads, splits
        )
    return out, lse


def attend_parts(
    form: Format,
    q_latent: Tensor,
    q_pe: Tensor,
    cache: Tensor,
    slots: Tensor,
    scale: float,
    cache_scale: Tensor | None = None,
    *,
    splits: int,
) -> Parts:
    """Parts of :func:`attend` that ``splits`` blocks, two or more, made of each of its tokens.

    There must be at least one token.

    Raises:
        UserError: the kernel does not take such input.
    """
    check(form, q_latent, q_pe, cache, slots)
    parts = empty_parts(form, q_latent, splits)
    _launch(form, q_latent, q_pe, cache, slots, scale, cache_scale, splits, (None, None), parts)
    return parts


def empty_parts(form: Format, q_latent: Tensor, splits: int) -> Parts:
    """Room for the parts of :func:`attend`."""
    tokens, heads = q_latent.shape[:2]
    rows = tokens * -(-heads // HEADS) * splits * HEADS
    kind = torch.float32 if form is Format.BF16 else torch.float16
    return Parts(
        torch.empty((rows, LATENT), dtype=kind, device=q_latent.device),
        torch.empty((rows, 2), dtype=torch.float32, device=q_latent.device),
    )


def splits_for(form: Format, q_latent: Tensor, slots: Tensor) -> int:
    """Blocks that share the keys of a token on the tensors' device."""
    units = q_latent.shape[0] * -(-q_latent.shape[1] // HEADS)
    return _splits(units, -(-slots.shape[1] // form.tile), multiprocessors(q_latent.device))


def _launch(
    form: Format,
    q_latent: Tensor,
    q_pe: Tensor,
    cache: Tensor,
    slots: Tensor,
    scale: float,
    cache_scale: Tensor | None,
    splits: int,
    results: tuple[Tensor | None, Tensor | None],
    parts: Parts | None,
) -> None:
    """The main kernel: into ``results``, or into ``parts`` if there are several."""
    tokens, heads = q_latent.shape[:2]
    keys = slots.shape[1]
    tiles = -(-keys // form.tile)
    kernel(form)(
        (splits, -(-heads // HEADS), tokens),
        THREADS,
        q_latent,
        q_pe,
        cache,
        slots,
        cache_scale,
        *results,
        heads,
        keys,
        cache.shape[0] * cache.shape[1],
        slots.stride(0),
        q_latent.stride(0),
        q_latent.stride(1),
        q_pe.stride(0),
        q_pe.stride(1),
        tiles // splits,
        tiles % splits,
        float(scale),
        *((parts.values, parts.sums) if parts else (None, None)),
    )


def check(form: Format, q_latent: Tensor, q_pe: Tensor, cache: Tensor, slots: Tensor) -> None:
    """Refuse what the kernels do not take.

    Raises:
        UserError: of operands, with what they should be.
    """
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


def paged_latent_attention(
    q_latent: Tensor, q_pe: Tensor, cache: Tensor, slots: Tensor, scale: float
) -> Tensor:
    """``dsa::paged_latent_attention``; see :func:`attend`."""
    return attend(Format.BF16, q_latent, q_pe, cache, slots, scale)[0]


def paged_latent_attention_fp8(
    q_latent: Tensor, q_pe: Tensor, cache: Tensor, slots: Tensor, scale: float
) -> Tensor:
    """``dsa::paged_latent_attention_fp8``; see :func:`attend`."""
    return attend(Format.FP8, q_latent, q_pe, cache, slots, scale)[0]


def paged_latent_attention_fp8_tensor(
    q_latent: Tensor, q_pe: Tensor, cache: Tensor, slots: Tensor, scale: float, cache_scale: Tensor
) -> Tensor:
    """``dsa::paged_latent_attention_fp8_tensor``; see :func:`attend`."""
    return attend(Format.FP8_TENSOR, q_latent, q_pe, cache, slots, scale, cache_scale)[0]
