"""Rows of a latent cache in any format, gathered and brought to fp32.

The formats are those of :mod:`dsa_compile.ops.fused_cache`.
"""

import torch
from torch import Tensor

from dsa_compile.ops.quantize import E4M3, block_count, dequantize_blocks


def latent_rows(
    cache: Tensor, rows: Tensor, rank: int, cache_scale: Tensor | None = None
) -> Tensor:
    """Rows in the format that the cache's dtype tells, or a scale for all of it.

    Args:
        cache: ``[num_blocks, block_size, W]``: floating, or as below.
        rows: int32 or int64 ``[N]``, physical rows; a negative one gives zeros.
        rank: R.
        cache_scale: fp32 ``[1]`` where it is for the whole cache.

    Returns:
        fp32 ``[N, R + dr]``.
    """
    if cache_scale is not None:
        return latent_rows_fp8_tensor(cache, rows, cache_scale)
    if cache.dtype is torch.uint8:
        return latent_rows_fp8(cache, rows, rank)
    return _pick(cache, rows).float()


def latent_rows_fp8(cache: Tensor, rows: Tensor, rank: int) -> Tensor:
    """Rows in the ``fp8`` format.

    Args:
        cache: uint8 ``[num_blocks, block_size, fp8_row_bytes(R, dr)]``.
        rows: int32 or int64 ``[N]``, physical rows; a negative one gives zeros.
        rank: R.

    Returns:
        fp32 ``[N, R + dr]``.
    """
    picked = _pick(cache, rows)
    end = rank + block_count(rank) * 4
    scales = picked[:, rank:end].contiguous().view(torch.float32)
    k_pe = picked[:, end:].contiguous().view(torch.bfloat16).float()
    return torch.cat((dequantize_blocks(picked[:, :rank].view(E4M3), scales), k_pe), 1)


def latent_rows_fp8_tensor(cache: Tensor, rows: Tensor, scale: Tensor) -> Tensor:
    """Rows of e4m3 under one static scale.

    Args:
        cache: e4m3, or the same bytes as uint8, ``[num_blocks, block_size, R + dr]``.
        rows: int32 or int64 ``[N]``, physical rows; a negative one gives zeros.
        scale: fp32 ``[1]``; a value is ``q * scale``.

    Returns:
        fp32 ``[N, R + dr]``.
    """
    return _pick(cache.view(torch.uint8), rows).view(E4M3).float() * scale


def _pick(cache: Tensor, rows: Tensor) -> Tensor:
    """``[N, width]`` in the cache's dtype, zeros where a row is negative (0 in every format)."""
    picked = cache.view(-1, cache.shape[2]).index_select(0, rows.clamp(min=0))
    return picked.masked_fill_((rows < 0).unsqueeze(1), 0)
