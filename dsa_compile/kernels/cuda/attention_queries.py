"""Index queries and the rotary part of attention's queries in one launch."""

import functools

import torch
from torch import Tensor

from dsa_compile.kernels.cuda.compiler import Defines
from dsa_compile.kernels.cuda.index_quantize import (
    QUERY_WARPS,
    ROPE_DIM,
    ROWS,
    query_operands,
    tiles_per_warp,
)
from dsa_compile.kernels.cuda.launch import CudaKernel, Int64
from dsa_compile.kernels.cuda.operands import C_TYPES, heads_of_16_bytes
from dsa_compile.ops.library import bad_input
from dsa_compile.ops.quantize import E4M3

_NAME = "attention_queries_fp8"


@functools.cache
def _kernel(table: torch.dtype, interleaved: bool, index_interleaved: bool) -> CudaKernel:
    defines: Defines = {
        "TABLE": C_TYPES[table],
        "INTERLEAVED": int(interleaved),
        "INDEX_INTERLEAVED": int(index_interleaved),
    }
    return CudaKernel("attention_queries.cu", "attention_queries", defines, overlap=True)


def attention_queries_fp8(
    q_pe: Tensor,
    index_q: Tensor,
    weights: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    index_interleaved: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """``dsa::attention_queries_fp8`` for bf16, 64 rotary values, heads in multiples of 16."""
    tokens, heads = q_pe.shape[:2]
    if q_pe.dtype is not torch.bfloat16 or q_pe.shape[2:] != (ROPE_DIM,) or heads % ROWS:
        raise bad_input(
            _NAME,
            f"q_pe bfloat16 [T, a multiple of {ROWS}, {ROPE_DIM}], not {q_pe.dtype} "
            f"{list(q_pe.shape)}",
        )
    index_q, weights, cos, sin = query_operands(_NAME, index_q, weights, cos, sin)
    if index_q.shape[0] != tokens:
        raise bad_input(_NAME, f"as many index queries as queries, not {list(index_q.shape)}")
    q_pe = heads_of_16_bytes(_NAME, q_pe)
    index_heads = index_q.shape[1]
    q_pe_out = torch.empty(q_pe.shape, dtype=q_pe.dtype, device=q_pe.device)
    q8 = torch.empty(index_q.shape, dtype=E4M3, device=q_pe.device)
    weights_out = torch.empty(weights.shape, dtype=torch.float32, device=q_pe.device)
    index_tiles, tiles = tokens * index_heads // ROWS, tokens * heads // ROWS
    run = tiles_per_warp(index_tiles, q_pe.device)
    index_warps = -(-index_tiles // run)
    _kernel(cos.dtype, interleaved, index_interleaved)(
        (-(-(index_warps + tiles) // QUERY_WARPS), 1, 1),
        32 * QUERY_WARPS,
        q_pe,
        index_q,
        weights,
        cos,
        sin,
        q_pe_out,
        q8,
        weights_out,
        index_warps,
        index_tiles,
        tiles,
        run,
        heads,
        index_heads,
        scale,
        Int64(q_pe.stride(0)),
        Int64(q_pe.stride(1)),
        Int64(index_q.stride(0)),
        Int64(index_q.stride(1)),
        Int64(weights.stride(0)),
        Int64(cos.stride(0)),
    )
    return q_pe_out, q8, weights_out
