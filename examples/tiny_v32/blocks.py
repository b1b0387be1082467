"""Matrices in FP8 blocks of 128 × 128, as DeepSeek and Z.ai publish them."""

import torch
from torch import Tensor

BLOCK = 128
_E4M3_MAX = torch.finfo(torch.float8_e4m3fn).max


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """float8_e4m3fn [N, K] and fp32 scales [ceil(N / 128), ceil(K / 128)] of ``weight`` [N, K]."""
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight.float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK))  # [r, 128, c, 128]
    largest = blocks.abs().amax(dim=(1, 3)).clamp(min=1e-8)
    scale = torch.exp2(torch.ceil(torch.log2(largest / _E4M3_MAX)))
    stored = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
    return stored.view(padded.shape)[:rows, :columns].contiguous(), scale


def dequantize(weight: Tensor, scale: Tensor) -> Tensor:
    """fp32 [N, K]: the value that :func:`quantize` stored."""
    spread = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return weight.float() * spread[: weight.shape[0], : weight.shape[1]]
