"""The FP8 indexer's operands: RoPE, Hadamard and quantisation with a warp for 8 or 16 vectors."""

import functools

import torch
from torch import Tensor

from dsa_compile.kernels.cuda.compiler import Defines
from dsa_compile.kernels.cuda.device import multiprocessors
from dsa_compile.kernels.cuda.launch import CudaKernel, Int64
from dsa_compile.kernels.cuda.operands import (
    C_TYPES,
    heads_of_16_bytes,
    require_constants,
    require_pages,
    rows_of_16_bytes,
    tables,
)
from dsa_compile.ops.quantize import E4M3

DIM, ROPE_DIM = 128, 64
ROWS, KEY_ROWS = 16, 8
"""Vectors of a warp: queries and keys."""
QUERY_WARPS, QUERY_BLOCKS = 4, 4
"""Warps of a block of queries, and blocks that a processor's registers hold."""


@functools.cache
def _query_kernel(table: torch.dtype, interleaved: bool) -> CudaKernel:
    defines: Defines = {"TABLE": C_TYPES[table], "INTERLEAVED": int(interleaved)}
    return CudaKernel("index_query.cu", "index_query", defines, overlap=True)


@functools.cache
def _key_kernel(table: torch.dtype, weight: torch.dtype, interleaved: bool) -> CudaKernel:
    defines: Defines = {
        "TABLE": C_TYPES[table],
        "WEIGHT": C_TYPES[weight],
        "INTERLEAVED": int(interleaved),
    }
    return CudaKernel("index_key.cu", "index_key", defines, overlap=True)


def index_query_quantize(
    q: Tensor, weights: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """``dsa::index_query_quantize`` for bf16 heads of 128, 16 or a multiple of them, 64 rotated."""
    tokens, heads = q.shape[:2]
    q, weights, cos, sin = query_operands("index_query_quantize", q, weights, cos, sin)
    out = torch.empty(q.shape, dtype=E4M3, device=q.device)
    weights_out = torch.empty(weights.shape, dtype=torch.float32, device=q.device)
    tiles = tokens * heads // ROWS
    run = tiles_per_warp(tiles, q.device)
    _query_kernel(cos.dtype, interleaved)(
        (-(-tiles // (QUERY_WARPS * run)), 1, 1),
        32 * QUERY_WARPS,
        q,
        weights,
        cos,
        sin,
        out,
        weights_out,
        tiles,
        run,
        heads,
        scale,
        Int64(q.stride(0)),
        Int64(q.stride(1)),
        Int64(weights.stride(0)),
        Int64(cos.stride(0)),
    )
    return out, weights_out


def tiles_per_warp(tiles: int, device: torch.device) -> int:
    """Tiles that a warp takes one after another, so that all warps are resident at once."""
    return max(1, -(-tiles // (multiprocessors(device) * QUERY_BLOCKS * QUERY_WARPS)))


def query_operands(
    op: str, q: Tensor, weights: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Index queries, weights and tables as the kernels take them."""
    cos, sin = tables(op, cos, sin)
    weights = weights if weights.stride(1) == 1 else weights.contiguous()
    return heads_of_16_bytes(op, q), weights, cos, sin


def write_index_key_fp8(
    k: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    cache: Tensor,
    slot_mapping: Tensor,
) -> None:
    """``dsa::write_index_key_fp8`` for bf16 keys of 128, of which 64 are rotated."""
    name = "write_index_key_fp8"
    require_constants(name, weight, bias)
    require_pages(name, cache)
    rows = rows_of_16_bytes(name, k)
    tokens = rows.shape[0]
    cos, sin = tables(name, cos, sin)
    _key_kernel(cos.dtype, weight.dtype, interleaved)(
        (-(-tokens // KEY_ROWS), 1, 1),
        32,
        rows,
        weight,
        bias,
        cos,
        sin,
        slot_mapping.contiguous(),
        cache,
        tokens,
        Int64(cache.shape[0] * cache.shape[1]),
        cache.shape[1],
        eps,
        Int64(rows.stride(0)),
        Int64(cos.stride(0)),
    )
