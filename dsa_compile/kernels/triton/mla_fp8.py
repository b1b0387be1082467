"""Latent attention over FP8 caches: their rows in bf16 first, then any attention over bf16 rows.

A row is dequantised once for all the tokens and heads that select it. That is what makes prefills
fast (4,096 tokens share each of 8,192 rows a thousandfold), and correct if not fast for decode.
"""

from collections.abc import Callable

from torch import Tensor

from dsa_compile.kernels.triton import mla
from dsa_compile.kernels.triton.latent_rows import (
    bf16_rows,
    latent_rows_fp8,
    latent_rows_fp8_tensor,
)

Attend = Callable[[Tensor, Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
"""As :func:`dsa_compile.kernels.triton.mla.attend`."""


def attend_fp8(
    q_latent: Tensor,
    q_pe: Tensor,
    cache: Tensor,
    slots: Tensor,
    scale: float,
    attend: Attend = mla.attend,
) -> tuple[Tensor, Tensor]:
    """``dsa::paged_latent_attention_fp8_lse`` with an attention over bf16 rows."""

    def dequantize(rows: Tensor, sparse: bool) -> Tensor:
        return latent_rows_fp8(cache, rows, q_latent.shape[2], sparse=sparse)

    rows, places = bf16_rows(dequantize, slots, cache.shape[0] * cache.shape[1])
    return attend(q_latent, q_pe, rows, places, scale)


def attend_fp8_tensor(
    q_latent: Tensor,
    q_pe: Tensor,
    cache: Tensor,
    slots: Tensor,
    scale: float,
    cache_scale: Tensor,
    attend: Attend = mla.attend,
) -> tuple[Tensor, Tensor]:
    """``dsa::paged_latent_attention_fp8_tensor_lse`` with an attention over bf16 rows."""

    def dequantize(rows: Tensor, sparse: bool) -> Tensor:
        return latent_rows_fp8_tensor(cache, rows, cache_scale, sparse=sparse)

    rows, places = bf16_rows(dequantize, slots, cache.shape[0] * cache.shape[1])
    return attend(q_latent, q_pe, rows, places, scale)


def paged_latent_attention_fp8(
    q_latent: Tensor, q_pe: Tensor, cache: Tensor, slots: Tensor, scale: float
) -> Tensor:
    """``dsa::paged_latent_attention_fp8``."""
    return attend_fp8(q_latent, q_pe, cache, slots, scale)[0]


def paged_latent_attention_fp8_lse(
    q_latent: Tensor, q_pe: Tensor, cache: Tensor, slots: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """``dsa::paged_latent_attention_fp8_lse``."""
    return attend_fp8(q_latent, q_pe, cache, slots, scale)


def paged_latent_attention_fp8_tensor(
    q_latent: Tensor,
    q_pe: Tensor,
    cache: Tensor,
    slots: Tensor,
    scale: float,
    cache_scale: Tensor,
) -> Tensor:
    """``dsa::paged_latent_attention_fp8_tensor``."""
    return attend_fp8_tensor(q_latent, q_pe, cache, slots, scale, cache_scale)[0]


def paged_latent_attention_fp8_tensor_lse(
    q_latent: Tensor,
    q_pe: Tensor,
    cache: Tensor,
    slots: Tensor,
    scale: float,
    cache_scale: Tensor,
) -> tuple[Tensor, Tensor]:
    """``dsa::paged_latent_attention_fp8_tensor_lse``."""
    return attend_fp8_tensor(q_latent, q_pe, cache, slots, scale, cache_scale)
