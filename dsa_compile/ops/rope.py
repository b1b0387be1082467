"""Rotary position embedding: the two pairings DeepSeek-V3.2 uses, and their tables.

Latent attention pairs neighbours (``x[2i], x[2i+1]``), the indexer pairs halves
(``x[i], x[i + D/2]``). A tensor without heads is passed with one head.
"""

import torch
from torch import Tensor

from dsa_compile.ops.facts import Family, Form, OpFacts
from dsa_compile.ops.library import bad_input, define


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
    if inv_freq.dtype is not torch.float32:
        raise bad_input("rope_tables", f"inv_freq as float32, not {inv_freq.dtype}")
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
    _check("rope_interleaved", x, cos)
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
    _check("rope_half", x, cos)
    first, second = x.chunk(2, -1)
    rotated = torch.cat((-second, first), -1)
    return (x * cos.unsqueeze(-2)).add_(rotated.mul_(sin.unsqueeze(-2))).contiguous()


def _check(op: str, x: Tensor, cos: Tensor) -> None:
    # a wider table or one without its token dimensions would broadcast to a wrong answer
    if x.shape[-1] != cos.shape[-1] or x.dim() != cos.dim() + 1 or x.dtype is not cos.dtype:
        raise bad_input(
            op,
            f"x [..., heads, D] with tables [..., D] of one dtype, not {list(x.shape)} {x.dtype} "
            f"with {list(cos.shape)} {cos.dtype}",
        )


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
