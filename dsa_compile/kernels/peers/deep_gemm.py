"""DeepGEMM: FP8 scores of the lightning indexer, and FP8 projections.

It takes 32 or 64 heads, and on Hopper pages of 64 keys and one or two rows a request. Its paged
kernel is planned by a kernel of its own from the context lengths.
"""

import importlib
from typing import Any

import torch
from torch import Tensor


def _library() -> Any:
    return importlib.import_module("deep_gemm")


def ragged_index_logits(
    q: Tensor, weights: Tensor, k: Tensor, k_scale: Tensor, starts: Tensor, ends: Tensor
) -> Tensor:
    """Scores of flat queries against the keys of many requests, one after another in one array.

    Args:
        q: e4m3 ``[T, H, 128]``.
        weights: fp32 ``[T, H]``.
        k: e4m3 ``[N, 128]``.
        k_scale: fp32 ``[N]``.
        starts: int32 ``[T]``, first key of each row.
        ends: int32 ``[T]``, end of each row's keys.

    Returns:
        fp32 ``[T, N]``; columns outside ``[starts[t], ends[t])`` are not written.
    """
    logits: Tensor = _library().fp8_mqa_logits(
        q, (k, k_scale), weights, starts, ends, clean_logits=False
    )
    return logits


def paged_index_logits(
    q: Tensor,
    weights: Tensor,
    cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    plan: Tensor,
) -> Tensor:
    """Scores of decoding requests with equally many rows.

    Args:
        q: e4m3 ``[R * n, H, 128]``.
        weights: fp32 ``[R * n, H]``.
        cache: uint8 ``[blocks, 64, 132]``.
        block_tables: int32 ``[R, M]``.
        context_lens: int32 ``[R, n]``, keys that each row sees.
        plan: from :func:`plan_paged_index_logits`, for the same lengths.

    Returns:
        fp32 ``[R * n, M * 64]``; columns that a row does not see are not written.
    """
    blocks, block_size, width = cache.shape
    logits: Tensor = _library().fp8_paged_mqa_logits(
        q.view(*context_lens.shape, *q.shape[1:]),
        cache.view(blocks, block_size, 1, width),
        weights,
        context_lens,
        block_tables,
        plan,
        block_tables.shape[1] * block_size,
        clean_logits=False,
    )
    return logits


def plan_paged_index_logits(context_lens: Tensor, block_size: int = 64) -> Tensor:
    """Plan by which the processors divide the keys of ``context_lens``, int32 ``[R, n]``."""
    processors = torch.cuda.get_device_properties(context_lens.device).multi_processor_count
    plan: Tensor = _library().get_paged_mqa_logits_metadata(context_lens, block_size, processors)
    return plan


def linear_fp8(x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    """``dsa::linear_fp8``; rows of ``x_scale`` are transposed by a kernel of its own.

    Args:
        x: e4m3 ``[T, K]``.
        x_scale: fp32 ``[T, K/128]``; columns aligned to 16 bytes spare the transposition.
        weight: e4m3 ``[N, K]``.
        weight_scale: fp32 ``[ceil(N/128), K/128]``.

    Returns:
        bf16 ``[T, N]``.
    """
    out = torch.empty(x.shape[0], weight.shape[0], dtype=torch.bfloat16, device=x.device)
    if x.shape[0]:
        _library().fp8_gemm_nt((x, x_scale), (weight, weight_scale), out)
    return out
