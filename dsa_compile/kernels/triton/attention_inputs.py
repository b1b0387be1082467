"""The parts of attention's first projection, with a launch for each part."""

from torch import Tensor

from dsa_compile.kernels.triton.index_key import write_index_key_fp8
from dsa_compile.kernels.triton.latent_cache import (
    norm_rope_write_latent_cache_fp8,
    norm_rope_write_latent_cache_fp8_tensor,
)
from dsa_compile.kernels.triton.norm_quantize import rms_norm_quantize


def attention_inputs_fp8(
    merged: Tensor,
    q_weight: Tensor,
    q_eps: float,
    k_weight: Tensor,
    k_bias: Tensor,
    k_eps: float,
    kv_weight: Tensor,
    kv_eps: float,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    index_interleaved: bool,
    ue8m0: bool,
    latent_cache: Tensor,
    index_cache: Tensor,
    slot_mapping: Tensor,
    latent_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``dsa::attention_inputs_fp8``, three launches."""
    parts = (q_weight.shape[0], k_weight.shape[0], kv_weight.shape[0] + cos.shape[1])
    q, k, kv = merged.split(parts, -1)
    write_index_key_fp8(
        k, k_weight, k_bias, k_eps, cos, sin, index_interleaved, index_cache, slot_mapping
    )
    latent = (kv, kv_weight, kv_eps, cos, sin, interleaved)
    if latent_scale is not None:
        norm_rope_write_latent_cache_fp8_tensor(*latent, latent_scale, latent_cache, slot_mapping)
    else:
        norm_rope_write_latent_cache_fp8(*latent, ue8m0, latent_cache, slot_mapping)
    return rms_norm_quantize(q, q_weight, q_eps, ue8m0)
