"""The indexer's weight of every head, from a product in fp32."""

import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from dsa_compile.ops.facts import CostFacts, Family, OpFacts, products
from dsa_compile.ops.library import define


def index_head_weights(x: Tensor, weight: Tensor, scale: float) -> Tensor:
    """``x weightᵀ * scale`` in fp32: rounding it further changes which keys are chosen.

    Args:
        x: ``[T, H]``, any floating dtype.
        weight: fp32 ``[heads, H]``.
        scale: factor on the products.

    Returns:
        fp32 ``[T, heads]``.
    """
    return F.linear(x.float(), weight).mul_(scale)


INDEX_HEAD_WEIGHTS = define(
    "index_head_weights(Tensor x, Tensor weight, float scale) -> Tensor",
    index_head_weights,
    "(x: f[T, H], weight: f32[h, H]) -> f32[T, h]",
    OpFacts(Family.INDEX_INPUTS, cost=CostFacts(flops=products("weight"))),
)
