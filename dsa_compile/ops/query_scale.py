"""Scaling of queries by their position, with learned factors for each head."""

from torch import Tensor

from dsa_compile.ops.facts import Family, Form, OpFacts
from dsa_compile.ops.library import define


def scale_by_position(x: Tensor, positions: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """``x * (scale * log(position + 1) + bias)``, so that a softmax stays sharp in long contexts.

    The logarithm is fp32; it and the factors are rounded to x's dtype, and so is every step from
    there, as in ``MistralLarge4TextSoftmaxScaling``.

    Args:
        x: ``[..., H, D]``.
        positions: int64 ``[...]``.
        scale: ``[H]``.
        bias: ``[H]``.

    Returns:
        ``[..., H, D]``.
    """
    log = (positions + 1).float().log().to(x.dtype).unsqueeze(-1)
    return (x * (scale.to(x.dtype) * log + bias.to(x.dtype)).unsqueeze(-1)).contiguous()


SCALE_BY_POSITION = define(
    "scale_by_position(Tensor x, Tensor positions, Tensor scale, Tensor bias) -> Tensor",
    scale_by_position,
    "(x: f[*L, H, D], positions: int[*L], scale: f[H], bias: f[H]) -> x[*L, H, D]",
    OpFacts(Family.ROPE, Form.ANY, torch_kernels=True),
)
