"""The indexer's weight of every head, from a product in fp32."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from dsa_compile.ops.facts import CostFacts, Family, OpFacts, products
from dsa_compile.ops.library import bad_input, define


def index_head_weights(x: Tensor, weight: Tensor, scale: float) -> Tensor:
    """``x weightᵀ * scale`` in fp32: rounding it further changes which keys are chosen.

    Args:
        x: ``[T, H]``, any floating dtype.
        weight: fp32 ``[heads, H]``.
        scale: factor on the products.

    Returns:
        fp32 ``[T, heads]``.
    """
    check_index_head_weights(x, weight)
    return F.linear(x.float(), weight).mul_(scale)


def check_index_head_weights(x: Tensor, weight: Tensor) -> None:
    """Refuse operands that do not fit together.

    Raises:
        ValueError: with what :func:`index_head_weights` takes and what it got.
    """
    if x.dim() != 2 or weight.shape[1:] != x.shape[1:] or weight.dtype is not torch.float32:
        raise bad_input(
            "index_head_weights",
            f"x [T, H] and weight float32 [heads, H], not {list(x.shape)} and "
            f"{list(weight.shape)} {weight.dtype}",
        )


INDEX_HEAD_WEIGHTS = define(
    "index_head_weights(Tensor x, Tensor weight, float scale) -> Tensor",
    index_head_weights,
    "(x: f[T, H], weight: f32[h, H]) -> f32[T, h]",
    OpFacts(Family.INDEX_INPUTS, cost=CostFacts(flops=products("weight"))),
)
