"""The parts of attention's first, merged projection, in one op.

Its columns are ``[q_a | wk | kv_a]``: the query's low rank, the index key, the latent row. The
parts' consumers do not depend on one another, so one launch serves them all; at a few tokens
launches are most of what the separate ops cost.
"""

from torch import Tensor

from dsa_compile.ops.facts import Family, OpFacts
from dsa_compile.ops.fused_cache import (
    norm_rope_write_latent_cache_fp8,
    norm_rope_write_latent_cache_fp8_tensor,
)
from dsa_compile.ops.index_fused import write_index_key_fp8
from dsa_compile.ops.library import define
from dsa_compile.ops.quantize import rms_norm_quantize


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
    """Quantise the normed query latent; write the index key and the latent row.

    Bitwise ``rms_norm_quantize``, ``write_index_key_fp8`` and ``norm_rope_write_latent_cache_fp8``
    (with a scale, ``…_fp8_tensor``) of the three parts; see there.

    Args:
        merged: ``[T, Rq + D + R + dr]``.
        q_weight: ``[Rq]``, of the query latent's norm.
        q_eps: of that norm.
        k_weight: ``[D]``, of the index key's layer norm.
        k_bias: ``[D]``.
        k_eps: of that norm.
        kv_weight: ``[R]``, of the latent's norm.
        kv_eps: of that norm.
        cos: ``[T, dr]``, for the latent's rotary part and the index key's first dr values.
        sin: as ``cos``.
        interleaved: layout of the latent's rotation.
        index_interleaved: layout of the index key's rotation.
        ue8m0: round the query latent's and the latent row's scales up to powers of two.
        latent_cache: uint8 ``fp8`` rows, written in place; with ``latent_scale`` uint8 rows of
            R + dr e4m3 values.
        index_cache: uint8 ``[num_blocks, block_size, D + 4]``, written in place.
        slot_mapping: int64 ``[T]``, the slot of each token in both caches, -1 for none.
        latent_scale: fp32 ``[1]``, the one scale of all latent rows, or None.

    Returns:
        q e4m3 ``[T, Rq]`` and scale fp32 ``[T, Rq / 128]``.
    """
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


ATTENTION_INPUTS_FP8 = define(
    "attention_inputs_fp8(Tensor merged, Tensor q_weight, float q_eps, Tensor k_weight,"
    " Tensor k_bias, float k_eps, Tensor kv_weight, float kv_eps, Tensor cos, Tensor sin,"
    " bool interleaved, bool index_interleaved, bool ue8m0, Tensor(a!) latent_cache,"
    " Tensor(b!) index_cache, Tensor slot_mapping, Tensor? latent_scale=None)"
    " -> (Tensor q, Tensor scale)",
    attention_inputs_fp8,
    "(merged: f[T, Rq + D + R + dr], q_weight: f[Rq], k_weight: f[D], k_bias: k_weight[D],"
    " kv_weight: f[R], cos: f[T, dr], sin: cos[T, dr],"
    " latent_cache: u8[P, bs, fp8_row_bytes(R, dr) if latent_scale is None else R + dr],"
    " index_cache: u8[P, bs, D + 4], slot_mapping: i64[T], latent_scale: f32[1])"
    " -> (e4m3[T, Rq], f32[T, block_count(Rq)])",
    OpFacts(Family.ATTENTION_INPUTS, skips="slot_mapping", indexer_rope="index_interleaved"),
    where=(
        "D & (D - 1) == 0",
        "dr <= D",
        "dr % 2 == 0",
    ),
    any_device=False,
)
