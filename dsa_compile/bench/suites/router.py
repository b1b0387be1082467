"""The router of one layer, from one token to a prefill chunk."""

import importlib
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from dsa_compile.bench.case import Case, Plan
from dsa_compile.ops.moe import router as reference

EXPERTS, HIDDEN = 256, 7168
OPTIONS = (8, 4, 8, True, 2.5)
"""Groups, groups kept, experts chosen, normalise, scale: DeepSeek-V3.2's."""
TOKENS = (1, 16, 64, 256, 1024, 4096, 8192)
MOST_DIFFERENT = 1e-3
"""Share of the chosen experts that may differ: scores that rounding makes equal."""


def plans() -> Iterator[Plan]:
    """By number of tokens."""
    for tokens in TOKENS:
        yield Plan("router", f"{tokens:,} tokens", partial(_router, tokens))


def _router(count: int) -> Case:
    triton = importlib.import_module("dsa_compile.kernels.triton.router")
    x = torch.randn(count, HIDDEN, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(EXPERTS, HIDDEN, device="cuda").mul_(0.02).bfloat16()
    bias = torch.rand(EXPERTS, device="cuda")

    def torch_router() -> tuple[Tensor, Tensor]:
        return reference(x, weight, bias, *OPTIONS)

    return Case(
        {
            "triton": [lambda: triton.router(x, weight, bias, *OPTIONS)],
            "torch": [torch_router],
        },
        _check(*torch_router()),
        bytes=2.0 * HIDDEN * (EXPERTS + count) + 96.0 * count,
        flops=2.0 * count * EXPERTS * HIDDEN,
    )


def _check(weights: Tensor, indices: Tensor) -> Callable[[tuple[Tensor, Tensor]], str | None]:
    want = torch.zeros(indices.shape[0], EXPERTS, device="cuda").scatter_(1, indices, weights)

    def check(result: tuple[Tensor, Tensor]) -> str | None:
        got = torch.zeros_like(want).scatter_(1, result[1], result[0])
        differ = float(((got > 0) != (want > 0)).sum() / indices.numel())
        if differ > MOST_DIFFERENT:
            return f"{differ:.1e} of the choices differ"
        worst = float(((got - want).abs() * ((got > 0) == (want > 0))).max())
        return None if worst < 1e-2 else f"weights differ by {worst:.1e}"

    return check
