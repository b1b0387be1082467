"""The weights of one region, loaded apart from a model."""

from collections.abc import Mapping

import torch
from torch import Tensor

from dsa_compile.weights.materialize import WeightSource
from dsa_compile.weights.plan import WeightPlan


def load_layer(
    plan: WeightPlan,
    kind: str,
    variables: Mapping[str, str],
    source: WeightSource,
    *,
    stem: str = "",
    device: str | torch.device = "cpu",
) -> dict[str, Tensor]:
    """All weights of one region, by key; each is allocated, then filled in place."""
    weights = {}
    for key, entry in plan.entries(kind).items():
        weights[key] = torch.empty(entry.shape, dtype=entry.torch_dtype, device=device)
        source.fill(stem, key, entry, variables, weights[key])
    return weights
