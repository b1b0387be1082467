"""The indexer's head weights for few tokens, in one launch."""

import functools

import torch
from torch import Tensor

from dsa_compile.kernels.cuda.launch import CudaKernel, Int64
from dsa_compile.kernels.cuda.operands import require_16_bytes, rows_of_16_bytes
from dsa_compile.ops.head_weights import check_index_head_weights
from dsa_compile.ops.library import bad_input

_THREADS = 256
_TOKENS = 4  # of a block
_CHUNK = 4 * _THREADS


@functools.cache
def _kernel(chunks: int) -> CudaKernel:
    return CudaKernel("head_weights.cu", "head_weights", {"CHUNKS": chunks}, overlap=True)


def index_head_weights(x: Tensor, weight: Tensor, scale: float) -> Tensor:
    """``dsa::index_head_weights`` for bf16 x, H a multiple of 1,024 up to 8,192.

    Raises:
        ValueError: operands do not fit together or are not supported.
    """
    name = "index_head_weights"
    check_index_head_weights(x, weight)
    tokens, hidden = x.shape
    if x.dtype is not torch.bfloat16 or hidden % _CHUNK or hidden > 8 * _CHUNK:
        raise bad_input(
            name,
            f"x bfloat16, H a multiple of {_CHUNK} up to {8 * _CHUNK}, not {x.dtype} {hidden}",
        )
    x, weight = rows_of_16_bytes(name, x), weight.contiguous()
    require_16_bytes(name, weight)
    heads = weight.shape[0]
    out = torch.empty(tokens, heads, dtype=torch.float32, device=x.device)
    _kernel(hidden // _CHUNK)(
        (heads, -(-tokens // _TOKENS), 1),
        _THREADS,
        x,
        weight,
        out,
        tokens,
        scale,
        Int64(x.stride(0)),
    )
    return out
