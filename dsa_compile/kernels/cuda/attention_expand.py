"""Latent attention and its way back to heads, quantised: few tokens by one launch less."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dsa_compile.kernels import absorb
from dsa_compile.kernels.cuda import head_products, mla, mla_decode
from dsa_compile.kernels.cuda.launch import CudaKernel, tensor_map
from dsa_compile.kernels.cuda.mla_decode import Format
from dsa_compile.ops.quantize import E4M3

MOST_PARTS = 72
"""Parts of all tokens that shared memory holds beside a head's matrix."""
EXPAND_TOKENS = 32
"""Up to which our own product is the faster one, as ``kernels/table.py`` has it."""
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


def _few_parts(form: Format, q_latent: Tensor, slots: Tensor) -> int:
    """Blocks that share the keys of a token; 0 where that is one, or parts are too many."""
    tokens = q_latent.shape[0]
    if not tokens or not slots.shape[1] or not mla.takes_few_fp8(q_latent, slots):
        return 0
    splits = mla_decode.splits_for(form, q_latent, slots)
    return splits if splits > 1 and tokens * splits <= MOST_PARTS else 0


def _attend(
    form: Format,
    attention: Callable[..., Tensor],
    args: tuple[Any, ...],
    w_uv: Tensor,
    ue8m0: bool,
) -> tuple[Tensor, Tensor]:
    q_latent, _, _, slots, _, *scales = args
    splits = _few_parts(form, q_latent, slots)
    if not splits:
        return expand_output_quantize(attention(*args), w_uv, ue8m0)
    tokens, heads = q_latent.shape[:2]
    head_products.check_expand(q_latent, w_uv)
    parts = mla_decode.attend_parts(form, *args, splits=splits)
    q = torch.empty(tokens, heads * head_products.ROWS, dtype=E4M3, device=w_uv.device)
    scale = torch.empty(tokens, heads, dtype=torch.float32, device=w_uv.device)
    kernel(form)(
        (heads, 1, 1),
        _THREADS,
        tensor_map(w_uv.view(-1, head_products.COLUMNS), head_products.BOX, l2_promotion=256),
        parts.values,
        parts.sums,
        scales[0] if scales else None,
        q,
        scale,
        tokens,
        splits,
        ue8m0,
    )
    return q, scale
