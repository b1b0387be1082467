"""Latent attention to rows of FP8 caches, and functions that return the log-sum-exp as well.

Rows are those of :mod:`dsa_compile.ops.fused_cache`: ``fp8`` carries a scale per 128 values and an
unquantised rotated part, ``fp8_tensor`` has one scale for everything. As in
:mod:`dsa_compile.ops.attention`, slots name distinct rows, -1 names none, and a token without any
row gives zeros; its log-sum-exp is minus infinity. Whatever is read is dequantised to fp32;
products and softmax are fp32, and one rounding to the query's dtype ends them.

The log-sum-exp is natural, of the scaled scores. Attention to a set of rows is put together from
parts of it with weights ``exp(lse_part - lse)``.
"""

import torch
from torch import Tensor

from dsa_compile.ops.attention import GATHER_BYTES, PAGED_ATTENTION
from dsa_compile.ops.latent_rows import latent_rows
from dsa_compile.ops.library import define

_ARGUMENTS = "Tensor q_latent, Tensor q_pe, Tensor cache, Tensor slots, float scale"


def paged_latent_attention_fp8(
    q_latent: Tensor, q_pe: Tensor, cache: Tensor, slots: Tensor, scale: float
) -> Tensor:
    """Latent attention to ``fp8`` rows of the paged cache.

    Args:
        q_latent: ``[T, H, R]``.
        q_pe: ``[T, H, dr]``.
        cache: uint8 ``[num_blocks, block_size, fp8_row_bytes(R, dr)]``.
        slots: int32 ``[T, K]``, physical rows.
        scale: on the dot products.

    Returns:
        ``[T, H, R]``.
    """
    return paged_latent_attention_lse(q_latent, q_pe, cache, slots, scale)[0]


def paged_latent_attention_fp8_tensor(
    q_latent: Tensor, q_pe: Tensor, cache: Tensor, slots: Tensor, scale: float, cache_scale: Tensor
) -> Tensor:
    """:func:`paged_latent_attention_fp8` to e4m3 rows under one scale.

    Args as there, and

    Args:
        cache: e4m3, or the same bytes as uint8, ``[num_blocks, block_size, R + dr]``.
        cache_scale: fp32 ``[1]``; a value is ``q * cache_scale``.
    """
    return paged_latent_attention_lse(q_latent, q_pe, cache, slots, scale, cache_scale)[0]


def paged_latent_attention_lse(
    q_latent: Tensor,
    q_pe: Tensor,
    cache: Tensor,
    slots: Tensor,
    scale: float,
    cache_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Latent attention to rows of any format, and the log-sum-exp of each row's scores.

    Args as of :func:`paged_latent_attention_fp8`, and

    Args:
        cache: rows as :func:`~dsa_compile.ops.latent_rows.latent_rows` tells them apart.
        cache_scale: fp32 ``[1]`` where it is for the whole cache.

    Returns:
        ``[T, H, R]`` and fp32 ``[T, H]``.
    """
    tokens, heads, rank = q_latent.shape
    out = torch.zeros_like(q_latent, memory_format=torch.contiguous_format)
    lse = torch.full((tokens, heads), float("-inf"), dtype=torch.float32, device=q_latent.device)
    if slots.numel() == 0:
        return out, lse
    width = rank + q_pe.shape[2]
    step = max(1, GATHER_BYTES // max(1, 4 * slots.shape[1] * (width + 2 * heads)))
    for start in range(0, tokens, step):
        chunk = slice(start, start + step)
        absent = slots[chunk] < 0
        keys = latent_rows(cache, slots[chunk].flatten(), rank, cache_scale)
        keys = keys.view(*absent.shape, width)
        query = torch.cat((q_latent[chunk], q_pe[chunk]), -1).float()
        scores = torch.matmul(query, keys.transpose(1, 2)).mul_(scale)
        scores.masked_fill_(absent.unsqueeze(1), float("-inf"))
        lse[chunk] = scores.logsumexp(-1)
        weights = scores.softmax(-1).masked_fill_(absent.all(1).view(-1, 1, 1), 0.0)
        out[chunk] = torch.matmul(weights, keys[..., :rank]).to(q_latent.dtype)
    return out, lse


PAGED_LATENT_ATTENTION_FP8 = define(
    f"paged_latent_attention_fp8({_ARGUMENTS}) -> Tensor",
    paged_latent_attention_fp8,
    "(q_latent: f[T, H, R], q_pe: q_latent[T, H, dr],"
    " cache: u8[P, bs, fp8_row_bytes(R, dr)], slots: i32[T, K]) -> q_latent[T, H, R]",
    PAGED_ATTENTION,
)
PAGED_LATENT_ATTENTION_FP8_TENSOR = define(
    f"paged_latent_attention_fp8_tensor({_ARGUMENTS}, Tensor cache_scale) -> Tensor",
    paged_latent_attention_fp8_tensor,
    "(q_latent: f[T, H, R], q_pe: q_latent[T, H, dr], cache: (e4m3 | u8)[P, bs, R + dr],"
    " slots: i32[T, K], cache_scale: f32[1]) -> q_latent[T, H, R]",
    PAGED_ATTENTION,
)
