"""Weights in FP8 with one scale for every 128×128; quantises those stored in another type."""

import torch
from torch import Tensor

from dsa_compile.facts.formats import E4M3_MATRIX

BLOCK = E4M3_MATRIX.block[0]
E4M3: torch.dtype = getattr(torch, E4M3_MATRIX.values)
_E4M3_MAX = E4M3_MATRIX.largest


def blocks(size: int) -> int:
    """Blocks along a dimension; the last may be partial."""
    return -(-size // BLOCK)


def scale_shape(shape: tuple[int, ...], stacked: int = 1) -> tuple[int, ...]:
    """Shape of the scales of a matrix ``[N, K]``, or of experts ``[E, N, K]``.

    Args:
        shape: of the weight.
        stacked: matrices of equal height that lie one above the other in N and are quantised each
            on its own, such as the gate's and the up projection's.
    """
    *outer, rows, columns = shape
    return (*outer, stacked * blocks(rows // stacked), blocks(columns))


def quantize_rows(wide: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise rows of a matrix, the first of which begins a block.

    ``scale = amax / 448`` of each block, 1 for a block of zeros; a value is ``q * scale``.

    Args:
        wide: fp32 ``[N, K]``.

    Returns:
        e4m3 ``[N, K]`` and scales fp32 ``[ceil(N/128), ceil(K/128)]``.
    """
    rows, columns = wide.shape
    padded = torch.nn.functional.pad(wide, (0, -columns % BLOCK, 0, -rows % BLOCK))
    tiles = padded.view(blocks(rows), BLOCK, blocks(columns), BLOCK)
    amax = tiles.abs().amax((1, 3))
    scale = torch.where(amax > 0, amax / _E4M3_MAX, 1.0)
    tiles /= scale[:, None, :, None]
    values = padded[:rows, :columns].clamp_(-_E4M3_MAX, _E4M3_MAX).to(E4M3)
    return values, scale
