"""FlashMLA: sparse MLA decode over ``fp8`` rows, sparse prefill over bf16 rows.

Both take 64 or 128 heads, queries of 576 with the rotated part behind the latent one, and slots in
multiples of 64 (decode) or 128 (prefill on Hopper). Decode is planned by a kernel of its own from
the shapes alone. The plan is made at the first call of a shape, so this one must not be captured in
a CUDA graph.
"""

import functools
import importlib
from typing import Any

import torch
from torch import Tensor

LATENT, ROPE = 512, 64


def _library() -> Any:
    return importlib.import_module("flash_mla")


@functools.cache
def _plan(device: torch.device, tokens: int, heads: int, keys: int, block_size: int) -> Any:
    """Metadata that FlashMLA keeps between calls of one shape."""
    return _library().get_mla_metadata()[0]


def sparse_decode(
    query: Tensor, cache: Tensor, slots: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """FlashMLA's own call, without what it takes to bring our arguments into its form.

    Args:
        query: bf16 ``[T, H, 576]``.
        cache: uint8 ``[num_blocks, block_size, 656]``.
        slots: int32 ``[T, K]``.
        scale: on the dot products.

    Returns:
        bf16 ``[T, H, 512]`` and the log-sum-exp, fp32 ``[T, H]``; plus infinity, unlike ours, where
        nothing is visible.
    """
    tokens, heads, _ = query.shape
    out, lse = _library().flash_mla_with_kvcache(
        query.unsqueeze(1),
        cache.unsqueeze(2),
        None,
        None,
        LATENT,
        _plan(query.device, tokens, heads, slots.shape[1], cache.shape[1]),
        None,
        scale,
        False,
        True,
        slots.unsqueeze(1),
    )
    return out.squeeze(1), lse.squeeze(2)


def paged_latent_attention_fp8(
    q_latent: Tensor, q_pe: Tensor, cache: Tensor, slots: Tensor, scale: float
) -> Tensor:
    """``dsa::paged_latent_attention_fp8``."""
    return sparse_decode(torch.cat((q_latent, q_pe), -1), cache, slots, scale)[0]


def sparse_prefill(
    query: Tensor, rows: Tensor, slots: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """FlashMLA's own call.

    Args:
        query: bf16 ``[T, H, 576]``.
        rows: bf16 ``[N, 576]``.
        slots: int32 ``[T, K]``.
        scale: on the dot products.

    Returns:
        bf16 ``[T, H, 512]`` and the natural log-sum-exp, fp32 ``[T, H]``.
    """
    out, _, lse = _library().flash_mla_sparse_fwd(
        query, rows.unsqueeze(1), slots.unsqueeze(1), scale, LATENT
    )
    return out, lse


def paged_latent_attention(
    q_latent: Tensor, q_pe: Tensor, cache: Tensor, slots: Tensor, scale: float
) -> Tensor:
    """``dsa::paged_latent_attention``."""
    query = torch.cat((q_latent, q_pe), -1)
    return sparse_prefill(query, cache.view(-1, cache.shape[2]), slots, scale)[0]
