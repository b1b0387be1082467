"""Latent attention to FP8 rows together with what follows it: back to heads, and quantised.

The two are one op because few tokens are attended to by several blocks each: what puts their parts
together can go on with the product, and the result in the latent space is never in memory.
"""

from dataclasses import replace

from torch import Tensor

from dsa_compile.ops.attention import PAGED_ATTENTION, PAGED_ATTENTION_COST
from dsa_compile.ops.attention_fp8 import (
    paged_latent_attention_fp8,
    paged_latent_attention_fp8_tensor,
)
from dsa_compile.ops.facts import products
from dsa_compile.ops.head_products import expand_output_quantize
from dsa_compile.ops.library import define


def paged_latent_attention_fp8_expand(
    q_latent: Tensor,
    q_pe: Tensor,
    cache: Tensor,
    slots: Tensor,
    scale: float,
    w_uv: Tensor,
    ue8m0: bool,
) -> tuple[Tensor, Tensor]:
    """``paged_latent_attention_fp8``, then ``expand_output_quantize`` of its result.

    Args:
        q_latent: ``[T, H, R]``.
        q_pe: ``[T, H, dr]``.
        cache: uint8 ``[num_blocks, block_size, fp8_row_bytes(R, dr)]``.
        slots: int32 ``[T, K]``, physical rows; -1 names none.
        scale: on the dot products.
        w_uv: ``[H, dv, R]`` in the queries' dtype, dv a multiple of 128.
        ue8m0: round the result's scales up to powers of two.

    Returns:
        e4m3 ``[T, H dv]`` and scale fp32 ``[T, H dv / 128]``.
    """
    out = paged_latent_attention_fp8(q_latent, q_pe, cache, slots, scale)
    return expand_output_quantize(out, w_uv, ue8m0)


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
    """``paged_latent_attention_fp8_tensor``, then ``expand_output_quantize`` of its result.

    Args as of both ops. Returns as :func:`paged_latent_attention_fp8_expand`.
    """
    out = paged_latent_attention_fp8_tensor(q_latent, q_pe, cache, slots, scale, cache_scale)
    return expand_output_quantize(out, w_uv, ue8m0)


_ARGUMENTS = "Tensor q_latent, Tensor q_pe, Tensor cache, Tensor slots, float scale"
_EXPAND = "Tensor w_uv, bool ue8m0) -> (Tensor q, Tensor out_scale)"

_PRODUCT = products("w_uv")
_FACTS = replace(
    PAGED_ATTENTION,
    cost=replace(
        PAGED_ATTENTION_COST,
        flops=lambda sizes: PAGED_ATTENTION_COST.flops(sizes) + _PRODUCT(sizes),
    ),
)

PAGED_LATENT_ATTENTION_FP8_EXPAND = define(
    f"paged_latent_attention_fp8_expand({_ARGUMENTS}, {_EXPAND}",
    paged_latent_attention_fp8_expand,
    "(q_latent: f[T, H, R], q_pe: q_latent[T, H, dr],"
    " cache: u8[P, bs, fp8_row_bytes(R, dr)], slots: i32[T, K], w_uv: q_latent[H, dv, R])"
    " -> (e4m3[T, H * dv], f32[T, H * dv // 128])",
    _FACTS,
    where=("dv % 128 == 0",),
)
PAGED_LATENT_ATTENTION_FP8_TENSOR_EXPAND = define(
    f"paged_latent_attention_fp8_tensor_expand({_ARGUMENTS}, Tensor cache_scale, {_EXPAND}",
    paged_latent_attention_fp8_tensor_expand,
    "(q_latent: f[T, H, R], q_pe: q_latent[T, H, dr], cache: (e4m3 | u8)[P, bs, R + dr],"
    " slots: i32[T, K], cache_scale: f32[1], w_uv: q_latent[H, dv, R])"
    " -> (e4m3[T, H * dv], f32[T, H * dv // 128])",
    _FACTS,
    where=("dv % 128 == 0",),
)
