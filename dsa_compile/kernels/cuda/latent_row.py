"""Rows of the latent cache from the raw projection, a warp a token."""

import functools

import torch
from torch import Tensor

from dsa_compile.kernels.cuda.compiler import Defines
from dsa_compile.kernels.cuda.launch import CudaKernel, Int64
from dsa_compile.kernels.cuda.operands import (
    C_TYPES,
    require_constants,
    require_pages,
    rows_of_16_bytes,
    tables,
)

ROPE_DIM = 64
"""A warp reads so many values at once."""
FP8, FP8_TENSOR = range(2)
"""Row formats, see :mod:`dsa_compile.ops.fused_cache`."""
_WARPS = 4


@functools.cache
def _kernel(
    rank: int, row_format: int, interleaved: bool, weight: torch.dtype, table: torch.dtype
) -> CudaKernel:
    defines: Defines = {
        "RANK": rank,
        "FORMAT": row_format,
        "INTERLEAVED": int(interleaved),
        "WEIGHT": C_TYPES[weight],
        "TABLE": C_TYPES[table],
    }
    return CudaKernel("latent_row.cu", "latent_row", defines, overlap=True)


def norm_rope_write_latent_cache_fp8(
    kv: Tensor,
    weight: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    ue8m0: bool,
    cache: Tensor,
    slot_mapping: Tensor,
) -> None:
    """``dsa::norm_rope_write_latent_cache_fp8`` for a rank of a multiple of 256."""
    name = "norm_rope_write_latent_cache_fp8"
    _launch(name, FP8, kv, weight, eps, cos, sin, interleaved, cache, slot_mapping, ue8m0=ue8m0)


def norm_rope_write_latent_cache_fp8_tensor(
    kv: Tensor,
    weight: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    scale: Tensor,
    cache: Tensor,
    slot_mapping: Tensor,
) -> None:
    """``dsa::norm_rope_write_latent_cache_fp8_tensor`` for a rank of a multiple of 256."""
    name = "norm_rope_write_latent_cache_fp8_tensor"
    _launch(
        name, FP8_TENSOR, kv, weight, eps, cos, sin, interleaved, cache, slot_mapping, scale=scale
    )


def _launch(
    op: str,
    row_format: int,
    kv: Tensor,
    weight: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    cache: Tensor,
    slot_mapping: Tensor,
    *,
    ue8m0: bool = False,
    scale: Tensor | None = None,
) -> None:
    rank = weight.shape[0]
    require_pages(op, cache)
    require_constants(op, weight)
    rows = rows_of_16_bytes(op, kv)
    tokens = rows.shape[0]
    cos, sin = tables(op, cos, sin)
    _kernel(rank, row_format, interleaved, weight.dtype, cos.dtype)(
        (-(-tokens // _WARPS), 1, 1),
        32 * _WARPS,
        rows,
        weight,
        cos,
        sin,
        slot_mapping.contiguous(),
        scale,
        cache,
        tokens,
        Int64(cache.shape[0] * cache.shape[1]),
        eps,
        ue8m0,
        Int64(rows.stride(0)),
        Int64(cos.stride(0)),
    )
