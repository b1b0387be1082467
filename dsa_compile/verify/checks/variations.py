"""Inputs that a rewrite is tried on beside the captured ones, made from them to be hard."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

CAPTURED = "captured"
_BIG, _TINY = 2.0**6, 2.0**-10  # powers of two: they round nothing

Variation = Callable[[Tensor, Tensor, int | None], Tensor]
"""Makes another input of a captured one, of the same input in the first step, and of the dimension
along which its tokens lie, if it has any."""


def token_dim(value: Tensor, first: Tensor, traced: Any, tokens: int) -> int | None:
    """The dimension of an input along which tokens lie; None if it has none.

    Args:
        value: the input in a step.
        first: the same in the first step.
        traced: what the graph says of it, whose ``shape`` has sizes that steps change as symbols.
        tokens: of the step. Rows that lanes have gathered are a multiple of them.
    """
    sizes = zip(traced.shape, value.shape, first.shape, strict=True)
    found = {
        dim: mine != other
        for dim, (size, mine, other) in enumerate(sizes)
        if not isinstance(size, int) and mine % tokens == 0
    }
    # a batch of one request is as long as a step of one token: steps differ in tokens alone
    return next((dim for dim, differs in found.items() if differs), next(iter(found), None))


def _scaled(factor: float) -> Variation:
    def scale(value: Tensor, first: Tensor, dim: int | None) -> Tensor:
        wide = value.dtype in (torch.float32, torch.bfloat16, torch.float16)
        return value * factor if wide else value

    return scale


def _equal(value: Tensor, first: Tensor, dim: int | None) -> Tensor:
    if dim is None or not value.is_floating_point():
        return value
    return first.narrow(dim, 0, 1).expand(value.shape).clone()


VARIATIONS: Mapping[str, Variation] = {
    CAPTURED: lambda value, first, dim: value,
    "large": _scaled(_BIG),
    "small": _scaled(_TINY),
    "equal": _equal,
}
"""Inputs that a site is tried on: the prompt's own values; those times 64, where softmax and FP8
saturate; times 1/1024, where epsilons weigh; and every token alike, so that all scores tie."""
