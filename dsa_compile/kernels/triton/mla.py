"""Paged latent attention for every shape: few heads, any number of slots, Hopper and Blackwell.

One program attends from a block of heads of one token. With many heads the products are
``scores[heads, slots]`` and ``out[heads, latent]``; with few, whose tile would be mostly padding,
both are transposed, so that slots and latent columns fill the rows of the matrix units. When tokens
and heads are too few to fill the device, the slots of a token are split among programs and a second
kernel joins the parts.
"""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from dsa_compile.kernels.cuda.device import capability, multiprocessors
from dsa_compile.kernels.triton.mla_kernel import attend_kernel, join_kernel
from dsa_compile.ops.library import bad_input

_LOG2E = 1.4426950408889634


@dataclass(frozen=True)
class Tile:
    """Tile of one program.

    Args:
        heads: of a program, a power of two.
        slots: of one step.
        transposed: heads are columns of the matrix units.
        warps: of a program.
        stages: loads in flight.
        gather: keys come through the copy engine, four rows at a time (Blackwell).
    """

    heads: int
    slots: int
    transposed: bool
    warps: int
    stages: int
    gather: bool = False


def choose_tile(heads: int, capability: int, dtype: torch.dtype = torch.bfloat16) -> Tile:
    """The tile for a number of query heads.

    Args:
        heads: of the query.
        capability: compute capability, 90 or 100.
        dtype: of query and rows. The published width in fp32 leaves shared memory for a small tile
            alone, and no matrix unit multiplies it exactly.
    """
    if dtype is torch.float32:
        return Tile(16, 16, False, 8, 1)
    if capability >= 100:
        return Tile(64, 32, False, 8, 2, True)  # tcgen05 takes 64 rows at the least
    if heads <= 32:
        return Tile(16 if heads <= 16 else 32, 64, True, 8, 2)
    return Tile(64, 64, False, 8, 2)


def choose_splits(programs: int, count: int, processors: int) -> int:
    """Number of parts, a power of two, into which the slots of a token are cut.

    Args:
        programs: tokens times blocks of heads.
        count: slots of a token.
        processors: of the device.
    """
    most = max(1, count // 128)
    return 1 << max(0, min(most, processors // max(1, programs)).bit_length() - 1)


def attend(
    q_latent: Tensor,
    q_pe: Tensor,
    cache: Tensor,
    slots: Tensor,
    scale: float,
    into: tuple[Tensor, Tensor] | None = None,
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
        into: where the two results go, contiguous; or None.
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
    tile = choose_tile(heads, capability(q_latent.device), cache.dtype)
    latent_rows = rope_rows = None
    if tile.gather:
        rows = cache.view(-1, latent + rope)
        latent_rows = TensorDescriptor.from_tensor(rows, [1, latent])
        rope_rows = TensorDescriptor.from_tensor(rows, [1, rope])
    count = slots.shape[1]
    blocks = triton.cdiv(heads, tile.heads)
    if splits is None:
        splits = choose_splits(tokens * blocks, count, multiprocessors(q_latent.device))
    out, lse = into or (
        q_latent.new_empty((tokens, heads, latent)),
        torch.empty((tokens, heads), dtype=torch.float32, device=q_latent.device),
    )
    if tokens == 0:
        return out, lse
    parts, part_lse = out, lse
    if splits > 1:
        parts = torch.empty(
            (tokens, splits, heads, latent), dtype=torch.float32, device=q_latent.device
        )
        part_lse = parts.new_empty((tokens, splits, heads))
    attend_kernel[(tokens, blocks, splits)](
        q_latent,
        q_pe,
        cache,
        latent_rows,
        rope_rows,
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
        cache.shape[0] * cache.shape[1],
        scale * _LOG2E,
        LATENT=latent,
        ROPE=rope,
        BLOCK_HEADS=tile.heads,
        BLOCK_SLOTS=tile.slots,
        SCAN=max(16, triton.next_power_of_2(count)),
        SPLITS=splits,
        TRANSPOSED=tile.transposed,
        GATHER=tile.gather,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    if splits > 1:
        join_kernel[(tokens, heads)](parts, part_lse, out, lse, heads, LATENT=latent, SPLITS=splits)
    return out, lse


def paged_latent_attention(
    q_latent: Tensor, q_pe: Tensor, cache: Tensor, slots: Tensor, scale: float
) -> Tensor:
    """``dsa::paged_latent_attention``; see :func:`attend`."""
    return attend(q_latent, q_pe, cache, slots, scale)[0]
