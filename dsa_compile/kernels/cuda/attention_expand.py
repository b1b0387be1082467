"""Latent attention and its way back to heads, quantised: few tokens by one launch less."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dsa_compile.kernels import absorb
from dsa_compile.kernels.cuda import head_products, mla, mla_decode, mla_decode_narrow
from dsa_compile.kernels.cuda.launch import CudaKernel, tensor_map
from dsa_compile.kernels.cuda.mla_decode import Format, Parts
from dsa_compile.kernels.cuda.mla_decode_narrow import Plan
from dsa_compile.ops.quantize import E4M3

MOST_PARTS = 72
"""Parts of all tokens that shared memory holds beside a head's matrix."""
EXPAND_TOKENS = 32
"""Most tokens for which our own product is the faster one, as ``kernels/table.py`` has it."""
_PART_BYTES = 1024
_THREADS = 256


def shared_bytes() -> int:
    """Dynamic shared memory of ``mla_decode_expand.cu``."""
    one_tile = head_products.TILE_TOKENS * (2 * head_products.COLUMNS + 16)
    return head_products.shared_bytes(head_products.COLUMNS) - one_tile + MOST_PARTS * _PART_BYTES


@functools.cache
def kernel(form: Format) -> CudaKernel:
    """The kernel that ends the attention of a row format, one of FP8."""
    defines = {"FORMAT": int(form), "MOST_PARTS": MOST_PARTS}
    return CudaKernel(
        "mla_decode_expand.cu", "mla_decode_expand", defines, shared=shared_bytes(), overlap=True
    )


def paged_latent_attention_fp8_expand(
    q_latent: Tensor,
    q_pe: Tensor,
    cache: Tensor,
    slots: Tensor,
    scale: float,
    w_uv: Tensor,
    ue8m0: bool,
) -> tuple[Tensor, Tensor]:
    """``dsa::paged_latent_attention_fp8_expand``.

    Raises:
        ValueError: operands do not fit together or are not supported.
        UserError: likewise, of attention.
    """
    args = (q_latent, q_pe, cache, slots, scale)
    return _attend(Format.FP8, mla.paged_latent_attention_fp8, args, w_uv, ue8m0)


def paged_latent_attention_fp8_tensor_expand(
    q_latent: Tensor,
    q_pe: Tensor,
    cache: Tensor,
    slots: Tensor,
    scale: float,
    cache_scale: Tensor,
    w_uv: Tensor,
    ue8m0: bool,
) -> tuple[Tensor, Tensor]:
    """``dsa::paged_latent_attention_fp8_tensor_expand``.

    Raises:
        ValueError: operands do not fit together or are not supported.
        UserError: likewise, of attention.
    """
    args = (q_latent, q_pe, cache, slots, scale, cache_scale)
    return _attend(Format.FP8_TENSOR, mla.paged_latent_attention_fp8_tensor, args, w_uv, ue8m0)


def expand_output_quantize(o_latent: Tensor, w_uv: Tensor, ue8m0: bool) -> tuple[Tensor, Tensor]:
    """``dsa::expand_output_quantize`` by whichever is the faster for so many tokens."""
    if o_latent.shape[0] <= EXPAND_TOKENS:
        return head_products.expand_output_quantize(o_latent, w_uv, ue8m0)
    return absorb.expand_output_quantize(o_latent, w_uv, ue8m0)


def choose(form: Format, q_latent: Tensor, slots: Tensor) -> Plan | None:
    """Plan for few tokens that go on to their heads; None where one block has all keys of a token,
    or parts are too many: then attention and the product are apart."""
    tokens, heads, _ = q_latent.shape
    if not tokens or not slots.shape[1] or not mla.takes_few_fp8(q_latent, slots):
        return None
    if plan := mla_decode_narrow.plan(tokens, heads, slots.shape[1]):
        return plan
    splits = mla_decode.splits_for(form, q_latent, slots)
    few = splits > 1 and tokens * splits <= MOST_PARTS
    return Plan(0, splits, 1) if few else None


def _attend(
    form: Format,
    attention: Callable[..., Tensor],
    args: tuple[Any, ...],
    w_uv: Tensor,
    ue8m0: bool,
) -> tuple[Tensor, Tensor]:
    q_latent, _, _, slots, _, *scales = args
    plan = choose(form, q_latent, slots)
    if not plan:
        return expand_output_quantize(attention(*args), w_uv, ue8m0)
    head_products.check_expand(q_latent, w_uv)
    tokens, cache_scale = q_latent.shape[0], scales[0] if scales else None
    if plan.keys:
        parts = mla_decode_narrow.attend_parts(form, *args, keys=plan.keys)
        return mla_decode_narrow.expand(form, parts, tokens, plan, w_uv, cache_scale, ue8m0)
    parts = mla_decode.attend_parts(form, *args, splits=plan.parts)
    return _expand(form, parts, tokens, plan.parts, w_uv, cache_scale, ue8m0)


def _expand(
    form: Format,
    parts: Parts,
    tokens: int,
    splits: int,
    w_uv: Tensor,
    cache_scale: Tensor | None,
    ue8m0: bool,
) -> tuple[Tensor, Tensor]:
    """The parts of blocks of 64 heads, a block a head."""
    heads = w_uv.shape[0]
    q = torch.empty(tokens, heads * head_products.ROWS, dtype=E4M3, device=w_uv.device)
    scale = torch.empty(tokens, heads, dtype=torch.float32, device=w_uv.device)
    kernel(form)(
        (heads, 1, 1),
        _THREADS,
        tensor_map(w_uv.view(-1, head_products.COLUMNS), head_products.BOX, l2_promotion=256),
        parts.values,
        parts.sums,
        cache_scale,
        q,
        scale,
        tokens,
        splits,
        ue8m0,
    )
    return q, scale
