"""The chosen experts' gated MLPs in FP8, with the published checkpoint's block scales."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from dsa_compile.ops.facts import Family, OpFacts
from dsa_compile.ops.library import define
from dsa_compile.ops.moe import experts_cost
from dsa_compile.ops.quantize import (
    dequantize_blocks,
    dequantize_weight,
    quantize_blocks,
)

WIDE_BYTES = 32 << 20
"""Bound on the fp32 weights of experts that are made at once, unless one alone exceeds it."""


def experts_fp8(
    x: Tensor,
    x_scale: Tensor,
    weights: Tensor,
    indices: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    down: Tensor,
    down_scale: Tensor,
) -> Tensor:
    """Weighted sum of the chosen experts' gated MLPs on block-quantised operands.

    ``silu(gate) * up`` is fp32 and quantised as :func:`quantize_blocks` does it, without a rounding
    in between. Routing weights multiply in fp32 after the down projection, the sum over the experts
    is fp32, and one rounding to bf16 ends it. An implementation may round an expert's output to
    bf16 before it is weighted.

    Args:
        x: e4m3 ``[N, H]``.
        x_scale: fp32 ``[N, ceil(H/128)]``.
        weights: fp32 ``[N, k]``.
        indices: int64 or int32 ``[N, k]``; one outside ``[0, E)`` is skipped, so that a rank that
            holds a slice of the experts computes its share.
        gate_up: e4m3 ``[E, 2I, H]``, gate rows first.
        gate_up_scale: fp32 ``[E, 2 ceil(I/128), ceil(H/128)]``, gate's first.
        down: e4m3 ``[E, H, I]``.
        down_scale: fp32 ``[E, ceil(H/128), ceil(I/128)]``.

    Returns:
        bf16 ``[N, H]``.
    """
    flat = indices.flatten()
    here = ((flat >= 0) & (flat < gate_up.shape[0])).nonzero().squeeze(1)
    ordered, order = flat[here].sort(stable=True)
    pairs = here[order]
    token = pairs.div(indices.shape[1], rounding_mode="floor")
    numbers, counts = (found.tolist() for found in ordered.unique_consecutive(return_counts=True))
    wide = dequantize_blocks(x, x_scale)[token]
    gate, up = _products(wide, numbers, counts, gate_up, gate_up_scale, 2).chunk(2, -1)
    hidden = dequantize_blocks(*quantize_blocks(F.silu(gate) * up, False))
    del wide, gate, up  # each holds a row for every pair
    made = _products(hidden, numbers, counts, down, down_scale, 1)
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    out.index_add_(0, token, made.mul_(weights.flatten()[pairs, None]))
    return out.bfloat16()


def _products(
    x: Tensor, numbers: list[int], rows: list[int], weight: Tensor, scale: Tensor, halves: int
) -> Tensor:
    """Rows of x ``[S, in]`` times the weights of their experts, fp32 ``[S, halves * out]``.

    Args:
        x: fp32, ``rows[0]`` rows of expert ``numbers[0]``, then ``rows[1]`` of the next.
        numbers: of the experts.
        rows: of each.
        weight: e4m3 ``[E, halves * out, in]``.
        scale: fp32 ``[E, halves * ceil(out/128), ceil(in/128)]``.
        halves: parts of a weight, whose blocks are counted apart.
    """
    made = x.new_empty(x.shape[0], weight.shape[1])
    parts = zip(x.split(rows), made.split(rows), strict=True)
    for first, count in _runs(numbers, max(1, WIDE_BYTES // (4 * weight[0].numel()))):
        halved = (
            whole[first : first + count].unflatten(1, (halves, -1)) for whole in (weight, scale)
        )
        wide = dequantize_weight(*halved).flatten(1, 2)
        for matrix, (taken, out) in zip(wide.mT.unbind(0), parts, strict=False):
            torch.mm(taken, matrix, out=out)
    return made


def _runs(numbers: Sequence[int], most: int) -> Iterator[tuple[int, int]]:
    """Consecutive numbers among ascending ones: the first and how many, no more than ``most``."""
    start = 0
    for end in range(1, len(numbers) + 1):
        whole = end == len(numbers) or numbers[end] != numbers[end - 1] + 1
        if whole or end - start == most:
            yield numbers[start], end - start
            start = end


_COST = replace(experts_cost("gate_up", "gate_up_scale", "down", "down_scale"), e4m3_products=True)

EXPERTS_FP8 = define(
    "experts_fp8(Tensor x, Tensor x_scale, Tensor weights, Tensor indices, Tensor gate_up,"
    " Tensor gate_up_scale, Tensor down, Tensor down_scale) -> Tensor",
    experts_fp8,
    "(x: e4m3[N, H], x_scale: f32[N, block_count(H)], weights: f32[N, k], indices: int[N, k],"
    " gate_up: e4m3[E, 2 * I, H], gate_up_scale: f32[E, 2 * block_count(I), block_count(H)],"
    " down: e4m3[E, H, I], down_scale: f32[E, block_count(H), block_count(I)]) -> bf16[N, H]",
    OpFacts(Family.EXPERTS, skips="indices", sums=("E", "I"), cost=_COST),
    any_device=False,
)
