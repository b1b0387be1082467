"""Attention to FP8 rows, then the product with a matrix a head and its quantisation."""

from torch import Tensor

from dsa_compile.kernels import absorb
from dsa_compile.kernels.triton import mla_fp8


def paged_latent_attention_fp8_expand(
    q_latent: Tensor,
    q_pe: Tensor,
    cache: Tensor,
    slots: Tensor,
    scale: float,
    w_uv: Tensor,
    ue8m0: bool,
) -> tuple[Tensor, Tensor]:
    """``dsa::paged_latent_attention_fp8_expand``."""
    out = mla_fp8.paged_latent_attention_fp8(q_latent, q_pe, cache, slots, scale)
    return absorb.expand_output_quantize(out, w_uv, ue8m0)


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
    """``dsa::paged_latent_attention_fp8_tensor_expand``."""
    out = mla_fp8.paged_latent_attention_fp8_tensor(
        q_latent, q_pe, cache, slots, scale, cache_scale
    )
    return absorb.expand_output_quantize(out, w_uv, ue8m0)
