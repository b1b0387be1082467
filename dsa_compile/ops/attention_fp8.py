"""Latent attention to rows of FP8 caches, and functions that return the log-sum-exp as well.

Rows are those of :mod:`dsa_compile.ops.fused_cache`: ``fp8`` carries a scale per 128 values and an
unquantised rotated part, ``fp8_tensor`` has one scale for everything. As in
:mod:`dsa_compile.ops.attention`, slots name distinct rows, -1 names none, and a token without any
row gives zeros; its log-sum-exp is minus infinity. Whatever is read is dequantised to fp32;
products and softmax are fp32, and one rounding to the query's dtype ends them.

The log-sum-exp is natural, of the scaled scores. Attention to a set of rows is put together from
parts of it with weights ``exp(lse_part - lse)``.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from dsa_compile.ops.attention import GATHER_BYTES, PAGED_ATTENTION
from dsa_compile.ops.latent_rows import latent_rows_fp8, latent_rows_fp8_tensor
from dsa_compile.ops.library import define

Gather = Callable[[Tensor], Tensor]
"""Slots ``[N]`` to their rows in fp32, ``[N, R + dr]``; zeros for a negative one."""

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
    return paged_latent_attention_fp8_lse(q_latent, q_pe, cache, slots, scale)[0]


def paged_latent_attention_fp8_lse(
    q_latent: Tensor, q_pe: Tensor, cache: Tensor, slots: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """:func:`paged_latent_attention_fp8`, and the log-sum-exp of each row's scores.

    Returns:
        ``[T, H, R]`` and fp32 ``[T, H]``.
    """
    rank = q_latent.shape[2]
    return _attend(q_latent, q_pe, slots, scale, lambda rows: latent_rows_fp8(cache, rows, rank))


def paged_latent_attention_fp8_tensor(
    q_latent: Tensor, q_pe: Tensor, cache: Tensor, slots: Tensor, scale: float, cache_scale: Tensor
) -> Tensor:
    """Latent attention to e4m3 rows under one scale.

    Args:
        q_latent: ``[T, H, R]``.
        q_pe: ``[T, H, dr]``.
        cache: e4m3, or the same bytes as uint8, ``[num_blocks, block_size, R + dr]``.
        slots: int32 ``[T, K]``, physical rows.
        scale: on the dot products.
        cache_scale: fp32 ``[1]``; a value is ``q * cache_scale``.

    Returns:
        ``[T, H, R]``.
    """
    return paged_latent_attention_fp8_tensor_lse(q_latent, q_pe, cache, slots, scale, cache_scale)[
        0
    ]


def paged_latent_attention_fp8_tensor_lse(
    q_latent: Tensor, q_pe: Tensor, cache: Tensor, slots: Tensor, scale: float, cache_scale: Tensor
) -> tuple[Tensor, Tensor]:
    """:func:`paged_latent_attention_fp8_tensor`, and the log-sum-exp of each row's scores.

    Returns:
        ``[T, H, R]`` and fp32 ``[T, H]``.
    """

    def gather(rows: Tensor) -> Tensor:
        return latent_rows_fp8_tensor(cache, rows, cache_scale)

    return _attend(q_latent, q_pe, slots, scale, gather)


def paged_latent_attention_lse(
    q_latent: Tensor, q_pe: Tensor, cache: Tensor, slots: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """``dsa::paged_latent_attention``, and the log-sum-exp of each row's scores.

    Returns:
        ``[T, H, R]`` and fp32 ``[T, H]``.
    """

    def gather(rows: Tensor) -> Tensor:
        # what an absent slot happens to read may be NaN, and 0 * NaN spreads
        picked = cache.view(-1, cache.shape[2]).index_select(0, rows.clamp(min=0)).float()
        return picked.masked_fill_((rows < 0).unsqueeze(1), 0.0)

    return _attend(q_latent, q_pe, slots, scale, gather)


def _attend(
    q_latent: Tensor, q_pe: Tensor, slots: Tensor, scale: float, gather: Gather
) -> tuple[Tensor, Tensor]:
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
        keys = gather(slots[chunk].flatten()).view(*absent.shape, width)
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
