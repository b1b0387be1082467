"""Inputs that a rewrite is tried on beside the captured ones, made from them to be hard."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

CAPTURED = "captured"
_BIG, _TINY = 2.0**6, 2.0**-10  # powers of two: they round nothing

Variation = Callable[[Tensor, Tensor, int], Tensor]
"""Makes another input of a captured one: of it, of the same in the first step, of the step's T."""


def _scaled(factor: float) -> Variation:
    def scale(value: Tensor, first: Tensor, tokens: int) -> Tensor:
        wide = value.dtype in (torch.float32, torch.bfloat16, torch.float16)
        return value * factor if wide else value

    return scale


def _equal(value: Tensor, first: Tensor, tokens: int) -> Tensor:
    if not value.is_floating_point() or tokens not in value.shape:
        return value
    # the dimension of tokens is one in which steps differ; heads may be as many
    sizes = list(zip(value.shape, first.shape, strict=True))
    known = [dim for dim, (mine, other) in enumerate(sizes) if mine == tokens != other]
    dim = known[0] if known else value.shape.index(tokens)
    return first.narrow(dim, 0, 1).expand(value.shape).clone()


VARIATIONS: Mapping[str, Variation] = {
    CAPTURED: lambda value, first, tokens: value,
    "large": _scaled(_BIG),
    "small": _scaled(_TINY),
    "equal": _equal,
}
"""What a site is tried on: the prompt's own values; those times 64, where softmax and FP8 saturate;
times 1/1024, where epsilons weigh; and every token alike, so that all scores tie."""
