"""Rotary position embedding: the two pairings DeepSeek-V3.2 uses, and their tables.

Latent attention pairs neighbours (``x[2i], x[2i+1]``), the indexer pairs halves
(``x[i], x[i + D/2]``). A tensor without heads is passed with one head.
"""

import torch
from torch import Tensor

from dsa_compile.ops.facts import Family, Form, OpFacts
from dsa_compile.ops.library import define


def rope_tables(
    positions: Tensor, inv_freq: Tensor, scaling: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of every position's angles, each written twice: ``cat(freqs, freqs)``.

    Args:
        positions: int64 ``[...]``.
        inv_freq: fp32 ``[D/2]``, radians per position.
        scaling: factor on both tables (yarn's attention scaling).
        dtype: of the results; angles are computed in fp32.

    Returns:
        cos and sin, ``[..., D]`` in ``dtype``.
    """
    angles = positions.unsqueeze(-1).float() * inv_freq
    cos, sin = angles.cos(), angles.sin()
    if scaling != 1.0:
        cos.mul_(scaling)
        sin.mul_(scaling)
    return torch.cat((cos, cos), -1).to(dtype), torch.cat((sin, sin), -1).to(dtype)


def rope_interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate neighbouring pairs; the result is de-interleaved, first members first.

    Args:
        x: ``[..., H, D]``.
        cos: ``[..., D]``, one row for all heads; only the first half is read.
        sin: as ``cos``.

    Returns:
        ``[..., H, D]``: ``cat(x0*cos - x1*sin, x1*cos + x0*sin)`` with ``x0 = x[..., 0::2]`` and
        ``x1 = x[..., 1::2]``.
    """
    half = x.shape[-1] // 2
    c, s = cos[..., None, :half], sin[..., None, :half]
    first, second = x[..., 0::2], x[..., 1::2]
    return torch.cat(((first * c).sub_(second * s), (second * c).add_(first * s)), -1)


def rope_half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs made of the two halves.

    Args:
        x: ``[..., H, D]``.
        cos: ``[..., D]``, one row for all heads.
        sin: as ``cos``.

    Returns:
        ``[..., H, D]``: ``x*cos + cat(-x[..., D/2:], x[..., :D/2])*sin``.
    """
    first, second = x.chunk(2, -1)
    rotated = torch.cat((-second, first), -1)
    return (x * cos.unsqueeze(-2)).add_(rotated.mul_(sin.unsqueeze(-2))).contiguous()


ROPE_TABLES = define(
    "rope_tables(Tensor positions, Tensor inv_freq, float scaling, ScalarType dtype)"
    " -> (Tensor cos, Tensor sin)",
    rope_tables,
    "(positions: int[*L], inv_freq: f32[h]) -> (dtype[*L, 2 * h], dtype[*L, 2 * h])",
    OpFacts(Family.ROPE, Form.ANY, torch_kernels=True),
)
ROPE_INTERLEAVED = define(
    "rope_interleaved(Tensor x, Tensor cos, Tensor sin) -> Tensor",
    rope_interleaved,
    "(x: f[*L, H, D], cos: x[*L, D], sin: x[*L, D]) -> x[*L, H, D]",
    OpFacts(Family.ROPE, Form.ANY),
    where=("D % 2 == 0",),
)
ROPE_HALF = define(
    "rope_half(Tensor x, Tensor cos, Tensor sin) -> Tensor",
    rope_half,
    "(x: f[*L, H, D], cos: x[*L, D], sin: x[*L, D]) -> x[*L, H, D]",
    OpFacts(Family.ROPE, Form.ANY),
    where=("D % 2 == 0",),
)
