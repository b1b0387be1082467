"""The router for few tokens: logits and choice, two short launches."""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from dsa_compile.kernels.cuda.launch import CudaKernel, Int64
from dsa_compile.kernels.cuda.operands import require_16_bytes, rows_of_16_bytes

_THREADS = 256
_BLOCK_EXPERTS, _BLOCK_TOKENS = 2, 4
_CHUNK = 1024  # values of a row that a block loads at once
_WARP = 32


@dataclass(frozen=True)
class _Kernels:
    logits: CudaKernel
    choice: CudaKernel


@functools.cache
def _kernels(hidden: int, experts: int) -> _Kernels:
    defines = {"CHUNKS": hidden // _CHUNK, "LANE_EXPERTS": experts // _WARP}
    return _Kernels(
        *(
            CudaKernel("router.cu", f"router_{n}", defines, overlap=True)
            for n in ("logits", "choice")
        )
    )


def router(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    n_group: int,
    topk_group: int,
    top_k: int,
    normalize: bool,
    scale: float,
    shared_experts: int = 0,
    slot_mapping: Tensor | None = None,
    zero_dropped: bool = False,
    softmax: bool = False,
) -> tuple[Tensor, Tensor]:
    """``dsa::router`` for bf16; of equal scores the lowest expert wins.

    H is a multiple of 1,024 up to 8,192, the experts a multiple of 32 up to 512 in a power of two
    of groups, and at most 32 are returned for a token.

    Raises:
        ValueError: operands do not fit together or are not supported.
    """
    assert bias is not None  # a condition in the table
    tokens, hidden = x.shape
    experts = weight.shape[0]
    columns = top_k + shared_experts
    if slot_mapping is not None:
        slot_mapping = slot_mapping.contiguous()
    x, weight, bias = rows_of_16_bytes("router", x), weight.contiguous(), bias.contiguous()
    require_16_bytes("router", weight)
    weights = torch.empty(tokens, columns, dtype=torch.float32, device=x.device)
    indices = torch.empty(tokens, columns, dtype=torch.int64, device=x.device)
    logits = torch.empty(tokens, experts, dtype=torch.float32, device=x.device)
    kernels = _kernels(hidden, experts)
    kernels.logits(
        (experts // _BLOCK_EXPERTS, -(-tokens // _BLOCK_TOKENS), 1),
        _THREADS,
        x,
        weight,
        logits,
        tokens,
        Int64(x.stride(0)),
    )
    kernels.choice(
        (tokens, 1, 1),
        _WARP,
        logits,
        bias,
        slot_mapping,
        weights,
        indices,
        n_group,
        topk_group,
        top_k,
        shared_experts,
        normalize,
        scale,
    )
    return weights, indices
