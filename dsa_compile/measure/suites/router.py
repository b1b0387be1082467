"""The router of one layer, from one token to a prefill chunk."""

import importlib
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from dsa_compile.measure.case import Case, Plan
from dsa_compile.ops.moe import router as reference

EXPERTS, HIDDEN = 256, 7168
OPTIONS = (8, 4, 8, True, 2.5)
"""Groups, groups kept, experts chosen, normalise, scale: DeepSeek-V3.2's."""
TOKENS = (1, 16, 64, 256, 1024, 4096, 8192)
FEW = 64
"""Tokens up to which the kernel for few of them is run."""
MOST_DIFFERENT = 2e-3
"""Share of the tokens that may choose other experts, between scores that sums in another order make
equal: of 8,192 none or one does on an H200."""
LARGEST_DIFFERENCE = 1e-5
"""Limit for a weight of the other tokens; 2e-6 on an H200."""


def plans() -> Iterator[Plan]:
    """Plans by number of tokens."""
    for tokens in TOKENS:
        yield Plan("router", f"{tokens:,} tokens", partial(_router, tokens))


def _router(count: int) -> Case:
    triton, cuda = (
        importlib.import_module(f"dsa_compile.kernels.{provider}.router")
        for provider in ("triton", "cuda")
    )
    x = torch.randn(count, HIDDEN, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(EXPERTS, HIDDEN, device="cuda").mul_(0.02).bfloat16()
    bias = torch.rand(EXPERTS, device="cuda")

    def torch_router() -> tuple[Tensor, Tensor]:
        return reference(x, weight, bias, *OPTIONS)

    return Case(
        {
            **({"cuda": [lambda: cuda.router(x, weight, bias, *OPTIONS)]} if count <= FEW else {}),
            "triton": [lambda: triton.router(x, weight, bias, *OPTIONS)],
            "torch": [torch_router],
        },
        _check(*torch_router()),
        bytes=2.0 * HIDDEN * (EXPERTS + count) + 96.0 * count,
        flops=2.0 * count * EXPERTS * HIDDEN,
    )


def _check(
    reference_weights: Tensor, reference_indices: Tensor
) -> Callable[[tuple[Tensor, Tensor]], str | None]:
    """Check of choices: a tie that falls the other way changes all of a token's weights, as they
    share one sum."""
    want = _by_expert(reference_weights, reference_indices)

    def check(result: tuple[Tensor, Tensor]) -> str | None:
        got = _by_expert(*result)
        same = ((got > 0) == (want > 0)).all(1)
        if (differ := 1 - float(same.float().mean())) > MOST_DIFFERENT:
            return f"{differ:.1e} of the tokens choose otherwise"
        worst = float((got - want)[same].abs().max())
        return None if worst < LARGEST_DIFFERENCE else f"weights differ by {worst:.1e}"

    return check


def _by_expert(weights: Tensor, indices: Tensor) -> Tensor:
    return weights.new_zeros(indices.shape[0], EXPERTS).scatter_(1, indices, weights)
