"""The gated activation into FP8 blocks."""

import torch
from torch import Tensor

from dsa_compile.kernels.cuda.launch import CudaKernel, Int64
from dsa_compile.kernels.cuda.operands import rows_of_16_bytes
from dsa_compile.ops.quantize import BLOCK, E4M3

_KERNEL = CudaKernel("swiglu_quantize.cu", "swiglu_quantize", overlap=True)
_THREADS = 256
_GROUPS = _THREADS // 16


def swiglu_packed_quantize(gate_up: Tensor, ue8m0: bool) -> tuple[Tensor, Tensor]:
    """``dsa::swiglu_packed_quantize`` for bf16."""
    name = "swiglu_packed_quantize"
    half = gate_up.shape[-1] // 2
    rows = rows_of_16_bytes(name, gate_up)
    shape = gate_up.shape[:-1]
    q = torch.empty((*shape, half), dtype=E4M3, device=gate_up.device)
    scale = torch.empty((*shape, half // BLOCK), dtype=torch.float32, device=gate_up.device)
    total = scale.numel()
    _KERNEL(
        (-(-total // _GROUPS), 1, 1),
        _THREADS,
        rows,
        q,
        scale,
        total,
        half // BLOCK,
        ue8m0,
        Int64(rows.stride(0)),
    )
    return q, scale
