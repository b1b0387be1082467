"""The indexer's head weights for few tokens, in one launch."""

import functools

import torch
from torch import Tensor

from dsa_compile.kernels.cuda.launch import CudaKernel, Int64
from dsa_compile.kernels.cuda.operands import require_16_bytes, rows_of_16_bytes

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
    tokens, hidden = x.shape
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
