"""vLLM's elementwise ops with our ops' signatures, from its library of stable-ABI kernels."""

import torch
from torch import Tensor

from dsa_compile.kernels.peers import vllm_files
from dsa_compile.ops.quantize import E4M3


def missing() -> str | None:
    """Load vLLM's ops; why they are not to be had, or None."""
    try:
        vllm_files.library("_C")
    except ModuleNotFoundError as error:
        return str(error)
    return None


def _quantized_like(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = torch.empty((x.shape[0], x.shape[1] // 128), device=x.device)
    return torch.empty_like(x, dtype=E4M3), scale


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``rms_norm``."""
    out = torch.empty_like(x)
    torch.ops._C.rms_norm(out, x, weight, eps)
    return out


def rms_norm_quantize(x: Tensor, weight: Tensor, eps: float, ue8m0: bool) -> tuple[Tensor, Tensor]:
    """``rms_norm_per_block_quant``."""
    q, scale = _quantized_like(x)
    torch.ops._C.rms_norm_per_block_quant(q, x, weight, scale, eps, None, None, 128, False)
    return q, scale


def quantize_blocks(x: Tensor, ue8m0: bool) -> tuple[Tensor, Tensor]:
    """``per_token_group_fp8_quant``."""
    q, scale = _quantized_like(x)
    torch.ops._C.per_token_group_fp8_quant(
        x, q, scale, 128, 1e-4, -448.0, 448.0, ue8m0, False, False
    )
    return q, scale


def swiglu_packed(gate_up: Tensor) -> Tensor:
    """``silu_and_mul``."""
    out = gate_up.new_empty((gate_up.shape[0], gate_up.shape[1] // 2))
    torch.ops._C.silu_and_mul(out, gate_up)
    return out


def swiglu_packed_quantize(gate_up: Tensor, ue8m0: bool) -> tuple[Tensor, Tensor]:
    """``silu_and_mul_per_block_quant``."""
    q, scale = _quantized_like(gate_up[:, : gate_up.shape[1] // 2])
    torch.ops._C.silu_and_mul_per_block_quant(q, gate_up, scale, 128, None, False)
    return q, scale
