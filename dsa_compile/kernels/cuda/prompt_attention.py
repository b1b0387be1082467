"""Attention of prompts by heads on Hopper, for keys of 128 + 64 values and values of 128.

As :mod:`dsa_compile.kernels.triton.prompt_attention`, whose preparation it shares, with
FlashAttention 3's schedule: a step's second product runs beside the first of the next step.
"""

import math

import torch
from torch import Tensor

from dsa_compile.kernels.cuda.device import multiprocessors
from dsa_compile.kernels.cuda.launch import CudaKernel, tensor_map
from dsa_compile.kernels.triton import prompt_attention as prepared
from dsa_compile.kernels.triton.selected_tokens import SelectedTokens
from dsa_compile.ops.library import bad_input

NOPE, ROPE, VALUES = 128, 64, 128
QUERIES, KEYS = 128, 128
SHARED_BYTES = 13 * 16_384 + 80  # checked by src/prompt_attention.cuh
THREADS = 384
_LOG2E = 1.4426950408889634


def _kernel(selected: int) -> CudaKernel:
    defines = {"SHARED_BYTES": SHARED_BYTES, "SELECTED": selected}
    return CudaKernel("prompt_attention.cu", "prompt_attention", defines, shared=SHARED_BYTES)


KERNELS = (_kernel(0), _kernel(1))


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
) -> Tensor:
    """Causal attention within each request, to keys and values of the step's tokens.

    Args:
        q_nope: bf16 ``[T, H, 128]``, last dimension contiguous, other strides multiples of 8.
        q_pe: bf16 ``[T, H, 64]``, likewise.
        k: bf16 ``[T, H * 128]``, contiguous: keys without their rotated part.
        rows: bf16 ``[T, R + 64]``, contiguous: the last 64 columns are the rotated keys.
        v: bf16 ``[T, H * 128]``, contiguous.
        slot_mapping: int64 ``[T]``, -1 for padding.
        positions: int64 ``[T]``, of each token in its request, whose tokens here begin at 0.
        scale: on the dot products, positive.
        selected: the tokens that each may attend to; None for all of its request up to itself.

    Returns:
        bf16 ``[T, H, 128]``; zeros for padding, and for a token that attends to none.

    Raises:
        ValueError: shapes, dtypes or strides other than these.
    """
    _check(q_nope, q_pe, rows, scale)
    tokens, heads, _ = q_nope.shape
    out = q_nope.new_empty((tokens, heads, VALUES))
    if not tokens:
        return out
    maps = (
        tensor_map(q_nope, (QUERIES, 1, 64)),
        tensor_map(q_pe, (QUERIES, 1, 64)),
        tensor_map(k, (KEYS, 64)),
        tensor_map(rows[:, -ROPE:], (KEYS, 64)),
        tensor_map(v, (KEYS, 64)),
    )
    for start, stop, bits in prepared.parts_of(selected, tokens, QUERIES):
        items = -(-(stop - start) // QUERIES) * heads
        KERNELS[bits is not None](
            (min(items, multiprocessors(q_nope.device)), 1, 1),
            THREADS,
            *maps,
            slot_mapping,
            positions,
            bits,
            out,
            0 if bits is None else bits.shape[1],
            start,
            stop,
            heads,
            math.gcd(heads, prepared.GROUP),
            scale * _LOG2E,
        )
    return out


def _check(q_nope: Tensor, q_pe: Tensor, rows: Tensor, scale: float) -> None:
    shapes = (q_nope.shape[2], q_pe.shape[2]) == (NOPE, ROPE) and scale > 0
    aligned = all(
        x.dtype is torch.bfloat16 and x.stride(2) == 1 and not (x.stride(0) | x.stride(1)) % 8
        for x in (q_nope, q_pe)
    )
    if not (shapes and aligned and rows.dtype is torch.bfloat16):
        raise bad_input(
            "paged_prompt_attention",
            "on Hopper: bf16 queries [T, H, 128] and [T, H, 64] with a contiguous last dimension "
            "and other strides in multiples of 8, and a positive scale; not "
            f"{list(q_nope.shape)}, {list(q_pe.shape)} {q_nope.dtype} and {scale}",
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
) -> Tensor:
    """``dsa::paged_prompt_attention``."""
    batch = slot_mapping, positions
    return prepared.paged_prompt_attention(
        q_nope, q_pe, cache, *batch, w_uk, w_uv, scale, selected_slots, attend_heads
    )


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
) -> Tensor:
    """``dsa::paged_prompt_attention_fp8``."""
    batch = slot_mapping, positions
    return prepared.paged_prompt_attention_fp8(
        q_nope, q_pe, cache, *batch, w_uk, w_uv, scale, selected_slots, attend_heads
    )


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
) -> Tensor:
    """``dsa::paged_prompt_attention_fp8_tensor``."""
    batch = slot_mapping, positions
    return prepared.paged_prompt_attention_fp8_tensor(
        q_nope, q_pe, cache, *batch, w_uk, w_uv, scale, cache_scale, selected_slots, attend_heads
    )
