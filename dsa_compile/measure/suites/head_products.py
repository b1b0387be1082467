"""Products around attention with a matrix a head, and the indexer's head weights.

Weights come from memory: calls take copies in turn that together do not fit in L2.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dsa_compile.kernels.implementation import HOPPER
from dsa_compile.kernels.registry import implementations
from dsa_compile.measure.case import Case, Plan
from dsa_compile.ops import REFERENCE
from dsa_compile.ops.quantize import dequantize_blocks

HEADS, NOPE, ROPE, RANK = 128, 128, 64, 512
INDEX_HEADS, HIDDEN = 64, 7168
TOKENS = (1, 4, 16, 32, 64, 128, 256, 1024, 4096)
FEW = 512
"""Most tokens of the cases in which kernels with a limit on tokens are run."""
WEIGHT_BYTES = 120e6
TOLERANCE = 5e-3
"""Relative error of all values together; quantised ones may differ by single steps."""


def plans() -> Iterator[Plan]:
    """Plans of every op, by number of tokens."""
    for tokens in TOKENS:
        yield Plan("absorb_rope_query", f"{tokens:,}", partial(absorb, tokens))
        yield Plan("expand_output_quantize", f"{tokens:,}", partial(expand, tokens))
        yield Plan("index_head_weights", f"{tokens:,}", partial(_head_weights, tokens))


def _bf16(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def _case(
    op: str,
    tokens: int,
    weight: Callable[[], Tensor],
    arguments: Callable[[Tensor], tuple[Any, ...]],
    moved: float,
    flops: float,
) -> Case:
    first = weight()
    weights = [first, *(weight() for _ in range(round(WEIGHT_BYTES / first.nbytes) - 1))]
    functions = {
        kernel.provider: kernel.load()
        for kernel in implementations(op, HOPPER)
        if kernel.max_tokens is None or tokens <= FEW
    }
    want = _values(REFERENCE[getattr(torch.ops.dsa, op).default](*arguments(first)))

    def check(result: Any) -> str | None:
        error = float((_values(result) - want).norm() / want.norm())
        return None if error < TOLERANCE else f"relative error {error:.1e}"

    return Case(
        {
            name: [partial(function, *arguments(w)) for w in weights]
            for name, function in functions.items()
        },
        check,
        bytes=moved + first.nbytes,
        flops=flops,
    )


def _values(result: Any) -> Tensor:
    """Values that a call computed, as one vector."""
    if isinstance(result, Tensor):
        return result.flatten()
    first, second = result
    if first.dtype is torch.float8_e4m3fn:
        return dequantize_blocks(first, second).flatten()
    return torch.cat([first.flatten(), second.flatten()]).float()


def absorb(tokens: int, heads: int = HEADS, nope: int = NOPE) -> Case:
    """Queries of so many heads times W_UK, their rotated part rotated."""
    q = _bf16(tokens, heads, nope + ROPE)
    angles = torch.rand(tokens, ROPE, device="cuda") * 6.28
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    return _case(
        "absorb_rope_query",
        tokens,
        lambda: _bf16(heads, nope, RANK).mul_(0.05),
        lambda w_uk: (q, w_uk, cos, sin),
        2.0 * tokens * (heads * (nope + RANK + 2 * ROPE) + 2 * ROPE),
        2.0 * tokens * heads * nope * RANK,
    )


def expand(tokens: int, heads: int = HEADS, values: int = NOPE) -> Case:
    """Attention's latent results times W_UV, quantised; a head has so many values."""
    o_latent = _bf16(tokens, heads, RANK)
    return _case(
        "expand_output_quantize",
        tokens,
        lambda: _bf16(heads, values, RANK).mul_(0.05),
        lambda w_uv: (o_latent, w_uv, True),
        tokens * heads * (2.0 * RANK + values + values / 32),
        2.0 * tokens * heads * values * RANK,
    )


def _head_weights(tokens: int) -> Case:
    x = _bf16(tokens, HIDDEN)
    return _case(
        "index_head_weights",
        tokens,
        lambda: torch.randn(INDEX_HEADS, HIDDEN, device="cuda").mul_(0.02),
        lambda weight: (x, weight, 0.125),
        tokens * (2.0 * HIDDEN + 4.0 * INDEX_HEADS),
        3 * 2.0 * tokens * INDEX_HEADS * HIDDEN,
    )
