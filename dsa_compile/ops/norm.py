"""Normalisations, with the rounding of the Hugging Face reference model."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from dsa_compile.ops.facts import Family, Form, OpFacts
from dsa_compile.ops.library import define


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension.

    Computed in fp32 and rounded to ``x.dtype`` *before* the product with ``weight``, as
    ``DeepseekV32RMSNorm`` does; a fused kernel that rounds once differs in bf16.

    Args:
        x: ``[..., D]``, any floating dtype.
        weight: ``[D]``.
        eps: added to the mean square.

    Returns:
        ``[..., D]`` in the promoted dtype of ``x`` and ``weight``.
    """
    wide = x.float()
    inverse = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    normed = wide * inverse
    if x.dtype is weight.dtype is torch.float32:
        return normed.mul_(weight).contiguous()
    return (weight * normed.to(x.dtype)).contiguous()


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Layer norm over the last dimension.

    Args:
        x: ``[..., D]``.
        weight: ``[D]``.
        bias: ``[D]``.
        eps: added to the variance.

    Returns:
        ``[..., D]`` in ``x.dtype``.
    """
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add to the residual stream and normalise the sum.

    Bitwise the two separate ops: the sum is rounded to its dtype before it is normalised.

    Args:
        x: ``[..., D]``, the branch's output.
        residual: ``[..., D]``, the stream so far.
        weight: ``[D]``.
        eps: added to the mean square.

    Returns:
        The normalised sum and the sum itself, both ``[..., D]``.
    """
    total = (residual + x).contiguous()
    return rms_norm(total, weight, eps), total


RMS_NORM = define(
    "rms_norm(Tensor x, Tensor weight, float eps) -> Tensor",
    rms_norm,
    "(x: f[*L, D], weight: f[D]) -> promote(x, weight)[*L, D]",
    OpFacts(Family.NORM, Form.ANY),
)
LAYER_NORM = define(
    "layer_norm(Tensor x, Tensor weight, Tensor bias, float eps) -> Tensor",
    layer_norm,
    "(x: f[*L, D], weight: f[D], bias: f[D]) -> x[*L, D]",
    OpFacts(Family.NORM, Form.ANY),
)
ADD_RMS_NORM = define(
    "add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps)"
    " -> (Tensor normed, Tensor residual_out)",
    add_rms_norm,
    "(x: f[*L, D], residual: f[*L, D], weight: f[D])"
    " -> (promote(x, residual, weight)[*L, D], promote(x, residual)[*L, D])",
    OpFacts(Family.NORM),
)
