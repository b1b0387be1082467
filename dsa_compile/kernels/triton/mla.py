"""Paged latent attention for every shape: few heads, any number of slots, Hopper and Blackwell.

One program attends from a block of heads of one token. With many heads the products are
``scores[heads, slots]`` and ``out[heads, latent]``; with few, whose tile would be mostly padding,
both are transposed, so that slots and latent columns fill the rows of the matrix units. When tokens
and heads are too few to fill the device, the slots of a token are split among programs and a second
kernel joins the parts.
"""

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsa_compile.ops.library import bad_input

_LOG2E = 1.4426950408889634


@triton.jit
def _attend(
    q_latent: tl.tensor,
    q_pe: tl.tensor,
    cache: tl.tensor,
    slots: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    q_token: int,
    q_head: int,
    pe_token: int,
    pe_head: int,
    row_stride: int,
    slots_token: int,
    heads: int,
    count: int,
    scale_log2: float,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_SLOTS: tl.constexpr,
    SCAN: tl.constexpr,
    SPLITS: tl.constexpr,
    TRANSPOSED: tl.constexpr,
) -> None:
    """Rows ``(token, split)`` of ``out`` and ``lse``; see :func:`attend` for the arguments."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    split = tl.program_id(2)
    present = head < heads
    latent = tl.arange(0, LATENT)
    rope = tl.arange(0, ROPE)
    q = tl.load(
        q_latent + token * q_token + head[:, None] * q_head + latent[None, :],
        present[:, None],
        other=0.0,
    )
    pe = tl.load(
        q_pe + token * pe_token + head[:, None] * pe_head + rope[None, :],
        present[:, None],
        other=0.0,
    )
    slots += token * slots_token
    places = tl.arange(0, SCAN)
    scanned = tl.load(slots + places, places < count, other=-1)
    used = tl.max(tl.where(scanned >= 0, places + 1, 0), 0)  # trailing -1 cost nothing
    share = tl.cdiv(tl.cdiv(used, BLOCK_SLOTS), SPLITS) * BLOCK_SLOTS
    first = split * share
    last = tl.minimum(first + share, used)

    top = tl.full((BLOCK_HEADS,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_HEADS,), tl.float32)
    if TRANSPOSED:
        acc = tl.zeros((LATENT, BLOCK_HEADS), tl.float32)
    else:
        acc = tl.zeros((BLOCK_HEADS, LATENT), tl.float32)
    for start in range(first, last, BLOCK_SLOTS):
        place = start + tl.arange(0, BLOCK_SLOTS)
        slot = tl.load(slots + place, place < last, other=-1)
        seen = slot >= 0
        row = cache + slot.to(tl.int64)[:, None] * row_stride
        # an absent row is read as zeros: a NaN in its place would survive a weight of zero
        kv = tl.load(row + latent[None, :], seen[:, None], other=0.0)
        k_pe = tl.load(row + LATENT + rope[None, :], seen[:, None], other=0.0)
        if TRANSPOSED:
            scores = tl.dot(kv, tl.trans(q))
            scores = tl.dot(k_pe, tl.trans(pe), scores) * scale_log2
            scores = tl.where(seen[:, None], scores, float("-inf"))
            new = tl.maximum(top, tl.max(scores, 0))
            shift = tl.where(new == float("-inf"), 0.0, new)
            weights = tl.exp2(scores - shift[None, :])
            decay = tl.exp2(top - shift)
            total = total * decay + tl.sum(weights, 0)
            acc = tl.dot(tl.trans(kv), weights.to(kv.dtype), acc * decay[None, :])
        else:
            scores = tl.dot(q, tl.trans(kv))
            scores = tl.dot(pe, tl.trans(k_pe), scores) * scale_log2
            scores = tl.where(seen[None, :], scores, float("-inf"))
            new = tl.maximum(top, tl.max(scores, 1))
            shift = tl.where(new == float("-inf"), 0.0, new)
            weights = tl.exp2(scores - shift[:, None])
            decay = tl.exp2(top - shift)
            total = total * decay + tl.sum(weights, 1)
            acc = tl.dot(weights.to(kv.dtype), kv, acc * decay[:, None])
        top = new

    share_of = tl.where(total > 0.0, 1.0 / total, 0.0)
    base = (token * SPLITS + split) * heads
    cell = (base + head) * LATENT
    if TRANSPOSED:
        result = (acc * share_of[None, :]).to(out.dtype.element_ty)
        tl.store(out + cell[None, :] + latent[:, None], result, present[None, :])
    else:
        result = (acc * share_of[:, None]).to(out.dtype.element_ty)
        tl.store(out + cell[:, None] + latent[None, :], result, present[:, None])
    # natural logarithm; log2(0) is -inf, and so is the result of a row without keys
    tl.store(lse + base + head, (top + tl.log2(total)) * 0.6931471805599453, present)


@triton.jit
def _join(
    parts: tl.tensor,
    part_lse: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    heads: int,
    LATENT: tl.constexpr,
    SPLITS: tl.constexpr,
) -> None:
    """Weighted mean of the parts of one token and head, by their log-sum-exp."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    split = tl.arange(0, SPLITS)
    latent = tl.arange(0, LATENT)
    cell = (token * SPLITS + split) * heads + head
    each = tl.load(part_lse + cell)
    top = tl.max(each, 0)
    shift = tl.where(top == float("-inf"), 0.0, top)
    weights = tl.exp(each - shift)
    total = tl.sum(weights, 0)
    part = tl.load(parts + cell[:, None] * LATENT + latent[None, :])
    joined = tl.sum(part * weights[:, None], 0) / tl.where(total > 0.0, total, 1.0)
    tl.store(out + (token * heads + head) * LATENT + latent, joined.to(out.dtype.element_ty))
    tl.store(lse + token * heads + head, top + tl.log(total))


@dataclass(frozen=True)
class Tile:
    """How one program is cut.

    Args:
        heads: of a program, a power of two.
        slots: of one step.
        transposed: heads are columns of the matrix units.
        warps: of a program.
        stages: loads in flight.
    """

    heads: int
    slots: int
    transposed: bool
    warps: int
    stages: int


def choose_tile(heads: int, capability: int) -> Tile:
    """The tile for a number of query heads.

    Args:
        heads: of the query.
        capability: compute capability, 90 or 100. On Blackwell the compiler keeps a second copy of
            the keys in shared memory, so that steps must be shorter.
    """
    slots = 64 if capability < 100 else 32
    if heads <= 32:
        return Tile(16 if heads <= 16 else 32, slots, True, 8, 2)
    return Tile(64, 32, False, 8, 2)


def choose_splits(programs: int, count: int, processors: int) -> int:
    """Into how many parts, a power of two, the slots of a token are cut.

    Args:
        programs: tokens times blocks of heads.
        count: slots of a token.
        processors: of the device.
    """
    most = max(1, count // 128)
    return 1 << max(0, min(most, processors // max(1, programs)).bit_length() - 1)


@functools.cache
def _processors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def _capability(device: int) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def attend(
    q_latent: Tensor,
    q_pe: Tensor,
    cache: Tensor,
    slots: Tensor,
    scale: float,
    *,
    splits: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention to rows of a paged cache, each of which is key (whole) and value (its first part).

    Args:
        q_latent: ``[T, H, R]``, last dimension contiguous; R a power of two.
        q_pe: ``[T, H, dr]``, last dimension contiguous; dr a power of two.
        cache: ``[num_blocks, block_size, R + dr]``, contiguous.
        slots: int32 ``[T, K]``, physical rows; -1 names none, wherever it stands.
        scale: on the dot products.
        splits: parts of a token's slots, a power of two; None: by the size of the device.

    Returns:
        The result ``[T, H, R]`` in the query's dtype, and the natural log-sum-exp of the scaled
        scores, fp32 ``[T, H]``. A row without any key gives zero and minus infinity.

    Raises:
        ValueError: shapes or strides other than these.
    """
    tokens, heads, latent = q_latent.shape
    rope = q_pe.shape[2]
    if (
        cache.shape[2] != latent + rope
        or not cache.is_contiguous()
        or slots.dtype != torch.int32
        or q_latent.stride(2) != 1
        or q_pe.stride(2) != 1
        or slots.stride(1) != 1
        or latent & (latent - 1)
        or rope & (rope - 1)
        or min(latent, rope) < 16
    ):
        raise bad_input(
            "paged_latent_attention",
            "on the GPU: queries and slots with a contiguous last dimension, int32 slots, "
            "a contiguous cache, latent and rotary widths that are powers of two from 16 on",
        )
    tile = choose_tile(heads, _capability(q_latent.device.index))
    count = slots.shape[1]
    blocks = triton.cdiv(heads, tile.heads)
    if splits is None:
        splits = choose_splits(tokens * blocks, count, _processors(q_latent.device.index))
    out = q_latent.new_empty((tokens, heads, latent))
    lse = torch.empty((tokens, heads), dtype=torch.float32, device=q_latent.device)
    if tokens == 0:
        return out, lse
    parts, part_lse = out, lse
    if splits > 1:
        parts = torch.empty(
            (tokens, splits, heads, latent), dtype=torch.float32, device=q_latent.device
        )
        part_lse = parts.new_empty((tokens, splits, heads))
    _attend[(tokens, blocks, splits)](
        q_latent,
        q_pe,
        cache,
        slots,
        parts,
        part_lse,
        q_latent.stride(0),
        q_latent.stride(1),
        q_pe.stride(0),
        q_pe.stride(1),
        latent + rope,
        slots.stride(0),
        heads,
        count,
        scale * _LOG2E,
        LATENT=latent,
        ROPE=rope,
        BLOCK_HEADS=tile.heads,
        BLOCK_SLOTS=tile.slots,
        SCAN=max(16, triton.next_power_of_2(count)),
        SPLITS=splits,
        TRANSPOSED=tile.transposed,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    if splits > 1:
        _join[(tokens, heads)](parts, part_lse, out, lse, heads, LATENT=latent, SPLITS=splits)
    return out, lse


def paged_latent_attention(
    q_latent: Tensor, q_pe: Tensor, cache: Tensor, slots: Tensor, scale: float
) -> Tensor:
    """``dsa::paged_latent_attention``; see :func:`attend`."""
    return attend(q_latent, q_pe, cache, slots, scale)[0]
