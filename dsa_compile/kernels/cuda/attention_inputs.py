"""The parts of attention's first projection, in one launch for a few tokens."""

import functools

import torch
from torch import Tensor

from dsa_compile.kernels.cuda.compiler import Defines
from dsa_compile.kernels.cuda.index_quantize import DIM, KEY_ROWS, write_index_key_fp8
from dsa_compile.kernels.cuda.latent_row import (
    FP8,
    FP8_TENSOR,
    norm_rope_write_latent_cache_fp8,
    norm_rope_write_latent_cache_fp8_tensor,
)
from dsa_compile.kernels.cuda.launch import CudaKernel, Int64
from dsa_compile.kernels.cuda.norm_quantize import rms_norm_quantize, threads_for
from dsa_compile.kernels.cuda.operands import (
    C_TYPES,
    require_constants,
    require_pages,
    rows_of_16_bytes,
    tables,
)
from dsa_compile.ops.quantize import BLOCK, E4M3

_NAME = "attention_inputs_fp8"
_FEW = 512
"""Tokens up to which one launch serves all parts; for more, the registers that the index keys take
would leave the norm of the queries too few loads in flight."""


@functools.cache
def _kernel(
    rank: int,
    latent_rank: int,
    row_format: int,
    layouts: tuple[bool, bool],
    types: tuple[torch.dtype, torch.dtype, torch.dtype, torch.dtype],
) -> CudaKernel:
    defines: Defines = {
        "RANK": rank,
        "THREADS": threads_for(rank, 1),
        "LATENT_RANK": latent_rank,
        "FORMAT": row_format,
        "INTERLEAVED": int(layouts[0]),
        "INDEX_INTERLEAVED": int(layouts[1]),
        **dict(
            zip(
                ("Q_WEIGHT", "KV_WEIGHT", "K_WEIGHT", "TABLE"),
                (C_TYPES[t] for t in types),
                strict=True,
            )
        ),
    }
    return CudaKernel("attention_inputs.cu", "attention_inputs", defines, overlap=True)


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
    """``dsa::attention_inputs_fp8`` for bf16, ranks of multiples of 256 and index keys of 128."""
    rank, latent_rank = q_weight.shape[0], kv_weight.shape[0]
    require_constants(_NAME, q_weight, k_weight, k_bias, kv_weight)
    require_pages(_NAME, latent_cache, index_cache)
    if merged.shape[0] > _FEW:
        latent = (merged[:, rank + DIM :], kv_weight, kv_eps, cos, sin, interleaved)
        if latent_scale is not None:
            norm_rope_write_latent_cache_fp8_tensor(
                *latent, latent_scale, latent_cache, slot_mapping
            )
        else:
            norm_rope_write_latent_cache_fp8(*latent, ue8m0, latent_cache, slot_mapping)
        key = (merged[:, rank : rank + DIM], k_weight, k_bias, k_eps, cos, sin, index_interleaved)
        write_index_key_fp8(*key, index_cache, slot_mapping)
        return rms_norm_quantize(merged[:, :rank], q_weight, q_eps, ue8m0)
    rows = rows_of_16_bytes(_NAME, merged)
    tokens = rows.shape[0]
    cos, sin = tables(_NAME, cos, sin)

    q = torch.empty((tokens, rank), dtype=E4M3, device=merged.device)
    scale = torch.empty((tokens, rank // BLOCK), dtype=torch.float32, device=merged.device)
    threads = threads_for(rank, 1)
    warps = threads // 32
    key_blocks, latent_blocks = -(-tokens // (KEY_ROWS * warps)), -(-tokens // warps)
    types = (q_weight.dtype, kv_weight.dtype, k_weight.dtype, cos.dtype)
    layouts = (interleaved, index_interleaved)
    _kernel(rank, latent_rank, FP8 if latent_scale is None else FP8_TENSOR, layouts, types)(
        (key_blocks + latent_blocks + tokens, 1, 1),
        threads,
        rows,
        q_weight,
        q_eps,
        k_weight,
        k_bias,
        k_eps,
        kv_weight,
        kv_eps,
        cos,
        sin,
        ue8m0,
        latent_cache,
        Int64(latent_cache.shape[0] * latent_cache.shape[1]),
        latent_scale,
        index_cache,
        Int64(index_cache.shape[0] * index_cache.shape[1]),
        index_cache.shape[1],
        slot_mapping.contiguous(),
        q,
        scale,
        tokens,
        key_blocks,
        latent_blocks,
        Int64(rows.stride(0)),
        Int64(cos.stride(0)),
    )
    return q, scale
