"""Latent attention over FP8 caches: their rows in bf16 first, then any attention over bf16 rows.

A row is dequantised once for all the tokens and heads that select it. That is what makes prefills
fast (4,096 tokens share each of 8,192 rows a thousandfold), and correct if not fast for decode.
Rows that no token selects cost nothing, however large the cache.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from dsa_compile.kernels.triton import mla
from dsa_compile.kernels.triton.latent_rows import latent_rows
from dsa_compile.kernels.triton.row_sets import distinct_rows

Results = tuple[Tensor, Tensor]
Attend = Callable[[Tensor, Tensor, Tensor, Tensor, float, Results], object]
"""Signature of :func:`dsa_compile.kernels.triton.mla.attend`, with the results to write to."""
Dequantize = Callable[[Tensor, Tensor | None], Tensor]
"""Rows int32 ``[N]``, and how many of them there are if not all, to bf16 ``[N, width]``."""

MOST_ROWS = 1 << 22
"""Most rows in bf16 at a time, 4.8 GB of the released width: as many as 2,048 tokens can name."""
_FEW_SLOTS = 1 << 16


def attend_fp8(
    q_latent: Tensor,
    q_pe: Tensor,
    cache: Tensor,
    slots: Tensor,
    scale: float,
    cache_scale: Tensor | None = None,
    attend: Attend = mla.attend,
) -> tuple[Tensor, Tensor]:
    """``dsa::paged_latent_attention_fp8``, with a scale ``…_fp8_tensor``, and the log-sum-exp.

    An attention over bf16 rows attends, to as many tokens at a time as the memory for rows allows.
    """

    def dequantize(rows: Tensor, count: Tensor | None) -> Tensor:
        return latent_rows(cache, rows, q_latent.shape[2], cache_scale, count=count)

    tokens, heads, latent = q_latent.shape
    out = q_latent.new_empty((tokens, heads, latent))
    lse = torch.empty((tokens, heads), dtype=torch.float32, device=q_latent.device)
    cache_rows = cache.shape[0] * cache.shape[1]
    step = max(1, tokens if cache_rows <= MOST_ROWS else MOST_ROWS // max(1, slots.shape[1]))
    for begin in range(0, tokens, step):
        part = slice(begin, begin + step)
        rows, places = bf16_rows(dequantize, slots[part], cache_rows)
        attend(q_latent[part], q_pe[part], rows, places, scale, (out[part], lse[part]))
    return out, lse


def bf16_rows(dequantize: Dequantize, slots: Tensor, cache_rows: int) -> tuple[Tensor, Tensor]:
    """The rows that slots name in bf16, and slots that name them there.

    Few slots are gathered one by one; of many, every row that is named is dequantised once.

    Args:
        dequantize: rows of the cache.
        slots: int32 ``[T, K]``; -1 names none.
        cache_rows: of the cache.

    Returns:
        A cache bf16 ``[1, N, width]`` with N at most the lesser of ``T * K`` and ``cache_rows``,
        and int32 ``[T, K]``.
    """
    if slots.numel() > _FEW_SLOTS:
        found = distinct_rows(slots, cache_rows)
        return dequantize(found.rows, found.count).unsqueeze(0), found.places
    places = torch.arange(slots.numel(), dtype=torch.int32, device=slots.device)
    absent = (slots < 0) | (slots >= cache_rows)
    picked = dequantize(slots.flatten(), None)
    return picked.unsqueeze(0), places.view(slots.shape).masked_fill_(absent, -1)


def paged_latent_attention_fp8(
    q_latent: Tensor, q_pe: Tensor, cache: Tensor, slots: Tensor, scale: float
) -> Tensor:
    """``dsa::paged_latent_attention_fp8``."""
    return attend_fp8(q_latent, q_pe, cache, slots, scale)[0]


def paged_latent_attention_fp8_tensor(
    q_latent: Tensor,
    q_pe: Tensor,
    cache: Tensor,
    slots: Tensor,
    scale: float,
    cache_scale: Tensor,
) -> Tensor:
    """``dsa::paged_latent_attention_fp8_tensor``."""
    return attend_fp8(q_latent, q_pe, cache, slots, scale, cache_scale)[0]
