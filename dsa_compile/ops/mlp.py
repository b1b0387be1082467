"""Projections, the embedding and the gated activation."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from dsa_compile.ops.facts import FACTS, CostFacts, Family, Form, OpFacts, products
from dsa_compile.ops.library import define


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Product with a row-major weight, without bias: ``[..., in] x [out, in] -> [..., out]``."""
    return F.linear(x, weight)


def embedding(ids: Tensor, weight: Tensor) -> Tensor:
    """Rows of a table: integer ids ``[...]``, table ``[V, D]`` -> ``[..., D]``."""
    return F.embedding(ids, weight)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up``, with silu rounded to the dtype before the product; all ``[..., I]``."""
    # silu of a strided half differs in the last bit from silu of a contiguous one (the tail of
    # every row leaves the vector path); contiguous first keeps swiglu_packed bitwise equal
    return F.silu(gate.contiguous()).mul_(up)


def swiglu_packed(gate_up: Tensor) -> Tensor:
    """:func:`swiglu` of the two halves of the last dimension, gate first.

    Args:
        gate_up: ``[..., 2I]``.

    Returns:
        ``[..., I]``, bitwise the result of :func:`swiglu`.
    """
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate.contiguous()).mul_(up)


_EMBEDDING_COST = CostFacts(reads={"weight": lambda s: s.tokens / s.shape("weight")[0]})

LINEAR = define(
    "linear(Tensor x, Tensor weight) -> Tensor",
    linear,
    "(x: f[*L, K], weight: x[N, K]) -> x[*L, N]",
    OpFacts(
        Family.LINEAR,
        Form.ANY,
        torch_kernels=True,
        sums=("K",),
        cost=CostFacts(flops=products("weight")),
    ),
)
EMBEDDING = define(
    "embedding(Tensor ids, Tensor weight) -> Tensor",
    embedding,
    "(ids: int[*L], weight: f[V, D]) -> weight[*L, D]",
    OpFacts(Family.EMBEDDING, Form.ANY, torch_kernels=True, cost=_EMBEDDING_COST),
)
SWIGLU = define(
    "swiglu(Tensor gate, Tensor up) -> Tensor",
    swiglu,
    "(gate: f[*L, I], up: gate[*L, I]) -> gate[*L, I]",
    OpFacts(Family.ACTIVATION, Form.ANY),
)
SWIGLU_PACKED = define(
    "swiglu_packed(Tensor gate_up) -> Tensor",
    swiglu_packed,
    "(gate_up: f[*L, W]) -> gate_up[*L, W // 2]",
    OpFacts(Family.ACTIVATION),
    where=("W % 2 == 0",),
)

# The traced op, which stays where recognize_embedding is disabled.
FACTS[torch.ops.aten.embedding.default] = OpFacts(Family.EMBEDDING, Form.ANY, cost=_EMBEDDING_COST)
