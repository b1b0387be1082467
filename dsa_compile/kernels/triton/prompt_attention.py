"""Causal attention of prompts by heads, for every shape, Hopper and Blackwell.

Rows of the cache are brought to the queries' dtype first, a step's tokens and no more; then two
products make keys and values of all heads, ``[T, H, dn]`` and ``[T, H, dv]``. The kernel is
FlashAttention's forward pass (arXiv:2307.08691): a program holds the queries of one head and goes
through their keys with an online softmax. A block of queries may be of several requests; each query
knows by its position where its own begins, so that short prompts fill blocks together.

Where tokens have selected what they attend to, a row of bits a query hides the rest of the keys,
which costs their products all the same.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from dsa_compile.kernels.triton.latent_rows import latent_rows_fp8, latent_rows_fp8_tensor
from dsa_compile.kernels.triton.prompt_attention_kernel import attend_prompt_kernel
from dsa_compile.kernels.triton.selected_tokens import SelectedTokens
from dsa_compile.ops.library import bad_input
from dsa_compile.ops.prompt_attention import finite_latents, written_rows

AttendHeads = Callable[..., Tensor]
"""A function that takes the arguments of :func:`attend_heads` but the tile."""

_LOG2E = 1.4426950408889634
GROUP = 16  # heads whose keys and values of 2,048 tokens, 20 MB, stay in the L2 cache together
_NARROW = 128  # keys and values of the published model; wider ones leave room for fewer at a time


@dataclass(frozen=True)
class PromptTile:
    """Tile of one program.

    Args:
        queries: of a program, a power of two and a multiple of ``keys``.
        keys: of one step, a power of two up to 64.
        warps: of a program.
        stages: loads in flight.
        tiles: keys and values come through the copy engine, where their widths are powers of two.
    """

    queries: int
    keys: int
    warps: int
    stages: int
    tiles: bool = False


def choose_prompt_tile(nope: int, values: int, dtype: torch.dtype) -> PromptTile:
    """The tile for the widths of keys, without their rotated part, and values.

    The tile for the published widths was the fastest of seven on an H100 at all lengths from 128 to
    2,048 tokens, with 128 heads and with 16: docs/log/prompt_attention.md.
    """
    if dtype is torch.float32:  # no matrix unit multiplies it exactly
        return PromptTile(32, 16, 4, 1)
    if max(nope, values) > _NARROW:
        return PromptTile(128, 32, 8, 2)
    return PromptTile(64, 64, 4, 2, tiles=True)


def attend_prompts(
    q_nope: Tensor,
    q_pe: Tensor,
    rows: Tensor,
    slot_mapping: Tensor,
    positions: Tensor,
    w_uk: Tensor,
    w_uv: Tensor,
    scale: float,
    selected: SelectedTokens | None = None,
    attend: AttendHeads | None = None,
) -> Tensor:
    """Causal attention within each request to latent rows of the step's tokens.

    Args:
        q_nope: ``[T, H, dn]``, last dimension contiguous.
        q_pe: ``[T, H, dr]``, last dimension contiguous.
        rows: ``[T, R + dr]`` in the queries' dtype, contiguous; zeros for padding.
        slot_mapping: int64 ``[T]``, -1 for padding.
        positions: int64 ``[T]``, of each token in its request, whose tokens here begin at 0.
        w_uk: ``[H, dn, R]``.
        w_uv: ``[H, dv, R]``.
        scale: on the dot products.
        selected: the tokens that each may attend to; None for all of its request up to itself.
        attend: what attends to the keys and values; None for :func:`attend_heads`.

    Returns:
        ``[T, H, dv]``; zeros for padding, and for a token that attends to none.

    Raises:
        ValueError: strides or dtypes other than these.
    """
    latent = w_uk.shape[2]
    if q_nope.stride(2) != 1 or q_pe.stride(2) != 1 or rows.dtype is not q_nope.dtype:
        raise bad_input(
            "paged_prompt_attention",
            "on the GPU: queries with a contiguous last dimension, rows in their dtype",
        )
    made = rows[:, :latent]
    k = torch.matmul(made, w_uk.flatten(0, 1).t())
    v = torch.matmul(finite_latents(made), w_uv.flatten(0, 1).t())
    attend = attend or attend_heads
    return attend(q_nope, q_pe, k, rows, v, slot_mapping, positions, scale, selected)


def attend_heads(
    q_nope: Tensor,
    q_pe: Tensor,
    k: Tensor,
    rows: Tensor,
    v: Tensor,
    slot_mapping: Tensor,
    positions: Tensor,
    scale: float,
    selected: SelectedTokens | None = None,
    tile: PromptTile | None = None,
) -> Tensor:
    """The kernel alone: as :func:`attend_prompts`, keys ``[T, H dn]`` and values ``[T, H dv]``
    given; of ``rows`` the last ``dr`` columns are the rotated keys. ``tile`` is how programs are
    cut; None for the one that :func:`choose_prompt_tile` gives."""
    tokens, heads, nope = q_nope.shape
    rope, values, width = q_pe.shape[2], v.shape[1] // heads, rows.shape[1]
    out = q_nope.new_empty((tokens, heads, values))
    if tokens == 0:
        return out
    tile = tile or choose_prompt_tile(nope, values, q_nope.dtype)
    whole = all(n >= 16 and n & (n - 1) == 0 for n in (nope, rope, values))
    k_tiles = pe_tiles = v_tiles = None
    if tile.tiles and whole:
        k_tiles = TensorDescriptor.from_tensor(k, [tile.keys, nope])
        pe_tiles = TensorDescriptor.from_tensor(rows, [tile.keys, rope])
        v_tiles = TensorDescriptor.from_tensor(v, [tile.keys, values])
    for start, stop, bits in parts_of(selected, tokens, tile.queries):
        attend_prompt_kernel[(triton.cdiv(stop - start, tile.queries) * heads,)](
            q_nope,
            q_pe,
            k,
            rows[:, width - rope :],
            v,
            k_tiles,
            pe_tiles,
            v_tiles,
            slot_mapping,
            positions,
            positions if bits is None else bits,  # nothing reads it
            out,
            q_nope.stride(0),
            q_nope.stride(1),
            q_pe.stride(0),
            q_pe.stride(1),
            rows.stride(0),
            0 if bits is None else bits.shape[1],
            start,
            stop,
            heads,
            scale * _LOG2E,
            NOPE=nope,
            ROPE=rope,
            VALUES=values,
            PAD_NOPE=_padded(nope),
            PAD_ROPE=_padded(rope),
            PAD_VALUES=_padded(values),
            LATENT=width - rope,
            QUERIES=tile.queries,
            KEYS=tile.keys,
            GROUP=math.gcd(heads, GROUP),
            TILES=k_tiles is not None,
            SELECTED=bits is not None,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
    return out


def parts_of(
    selected: SelectedTokens | None, tokens: int, queries: int
) -> Iterable[tuple[int, int, Tensor | None]]:
    """Stretches of a step's tokens: the first, behind the last, and the bits of their selections.

    Args:
        selected: of the step's tokens; None for one stretch without bits.
        tokens: of the step.
        queries: of a tile; every stretch but the last is a multiple.
    """
    if selected is None:
        return ((0, tokens, None),)
    return selected.parts(queries)


def _padded(width: int) -> int:
    """A width that matrix units take."""
    return max(16, int(triton.next_power_of_2(width)))


def _selected(
    slots: Tensor | None, slot_mapping: Tensor, positions: Tensor, cache: Tensor
) -> SelectedTokens | None:
    if slots is None:
        return None
    return SelectedTokens(
        slots.contiguous(), slot_mapping, positions, cache.shape[0] * cache.shape[1]
    )


def paged_prompt_attention(
    q_nope: Tensor,
    q_pe: Tensor,
    cache: Tensor,
    slot_mapping: Tensor,
    positions: Tensor,
    w_uk: Tensor,
    w_uv: Tensor,
    scale: float,
    selected_slots: Tensor | None = None,
    attend: AttendHeads | None = None,
) -> Tensor:
    """``dsa::paged_prompt_attention``."""
    rows = written_rows(cache, slot_mapping)
    batch = slot_mapping, positions
    selected = _selected(selected_slots, *batch, cache)
    return attend_prompts(q_nope, q_pe, rows, *batch, w_uk, w_uv, scale, selected, attend)


def paged_prompt_attention_fp8(
    q_nope: Tensor,
    q_pe: Tensor,
    cache: Tensor,
    slot_mapping: Tensor,
    positions: Tensor,
    w_uk: Tensor,
    w_uv: Tensor,
    scale: float,
    selected_slots: Tensor | None = None,
    attend: AttendHeads | None = None,
) -> Tensor:
    """``dsa::paged_prompt_attention_fp8``."""
    rows = latent_rows_fp8(cache, slot_mapping, w_uk.shape[2])
    batch = slot_mapping, positions
    selected = _selected(selected_slots, *batch, cache)
    return attend_prompts(q_nope, q_pe, rows, *batch, w_uk, w_uv, scale, selected, attend)


def paged_prompt_attention_fp8_tensor(
    q_nope: Tensor,
    q_pe: Tensor,
    cache: Tensor,
    slot_mapping: Tensor,
    positions: Tensor,
    w_uk: Tensor,
    w_uv: Tensor,
    scale: float,
    cache_scale: Tensor,
    selected_slots: Tensor | None = None,
    attend: AttendHeads | None = None,
) -> Tensor:
    """``dsa::paged_prompt_attention_fp8_tensor``."""
    rows = latent_rows_fp8_tensor(cache, slot_mapping, cache_scale)
    batch = slot_mapping, positions
    selected = _selected(selected_slots, *batch, cache)
    return attend_prompts(q_nope, q_pe, rows, *batch, w_uk, w_uv, scale, selected, attend)
