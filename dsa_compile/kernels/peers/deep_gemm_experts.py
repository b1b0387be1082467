"""DeepGEMM's grouped FP8 products as ``dsa::experts_fp8``.

It multiplies rows that lie by expert, every expert's beginning at a multiple of 128. Sorting, the
activation and the weighted sum are ours.
"""

import importlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dsa_compile.kernels.triton.activation import swiglu_packed_quantize
from dsa_compile.kernels.triton.experts_rows import combine, sort_pairs

ALIGNMENT = 128


def _library() -> Any:
    return importlib.import_module("deep_gemm")


@dataclass(frozen=True)
class Rows:
    """Rows of (token, slot) pairs.

    Args:
        capacity: rows in all, with gaps.
        places: int64 ``[N * k]``, row of every pair; ``capacity`` if its expert is absent.
        tokens: int64 ``[capacity]``, token of every row; of gaps the first.
        expert_of: int32 ``[capacity]``, expert of every row, negative in gaps.
    """

    capacity: int
    places: Tensor
    tokens: Tensor
    expert_of: Tensor


def place_rows(indices: Tensor, experts: int) -> Rows:
    """Rows for a choice of experts, int64 or int32 ``[N, k]``; sizes do not depend on it."""
    pairs, top_k = indices.numel(), indices.shape[1]
    device = indices.device
    starts, pair_of = sort_pairs(indices.contiguous(), experts)
    counts = starts.diff()
    padded = (counts + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    shift = padded.cumsum(0) - padded - starts[:-1]  # from sorted row to place
    row = torch.arange(pairs, dtype=torch.int32, device=device)
    expert = torch.searchsorted(starts[1:], row, right=True)
    present = row < starts[-1]
    most = pairs + (ALIGNMENT - 1) * min(pairs, experts)
    capacity = -(-most // ALIGNMENT) * ALIGNMENT
    place = torch.where(present, row + shift[expert.clamp(max=experts - 1)], capacity)
    pair = torch.where(present, pair_of, pairs).long()
    places = torch.full((pairs + 1,), capacity, device=device).scatter_(0, pair, place)
    tokens = torch.zeros(capacity + 1, dtype=torch.int64, device=device)
    tokens.scatter_(0, place, pair // top_k * present)
    expert_of = torch.full((capacity + 1,), -1, dtype=torch.int32, device=device)
    expert_of.scatter_(0, place, torch.where(present, expert, -1).int())
    return Rows(capacity, places[:pairs], tokens[:capacity], expert_of[:capacity])


def aligned(scale: Tensor) -> Tensor:
    """Scales by columns that start at multiples of 16 bytes, as the library wants them."""
    out: Tensor = _library().get_mn_major_tma_aligned_tensor(scale)
    return out


def gather_rows(rows: Rows, x: Tensor, x_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Gather every row's token and its scales."""
    gathered = x.view(torch.uint8).index_select(0, rows.tokens).view(x.dtype)
    return gathered, aligned(x_scale.index_select(0, rows.tokens))


def product(rows: Rows, x: Tensor, x_scale: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """Rows times the weight of their expert.

    Args:
        rows: from :func:`place_rows`.
        x: e4m3 ``[capacity, K]``.
        x_scale: fp32 ``[capacity, K/128]``, :func:`aligned`.
        weight: e4m3 ``[E, N, K]``.
        scale: fp32 ``[E, N/128, K/128]``.

    Returns:
        bf16 ``[capacity, N]``; gaps hold anything.
    """
    out = torch.empty(rows.capacity, weight.shape[1], dtype=torch.bfloat16, device=x.device)
    _library().m_grouped_fp8_gemm_nt_contiguous((x, x_scale), (weight, scale), out, rows.expert_of)
    return out


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
    """``dsa::experts_fp8``; gate, up and an expert's output are rounded to bf16.

    Raises:
        ValueError: operands do not fit together.
    """
    out = torch.empty(x.shape, dtype=torch.bfloat16, device=x.device)
    if indices.numel() == 0:
        return out.zero_()
    experts = down.shape[0]
    rows = place_rows(indices, experts)
    hidden = product(rows, *gather_rows(rows, x, x_scale), gate_up, gate_up_scale)
    q, scale = swiglu_packed_quantize(hidden, False)
    result = product(rows, q, aligned(scale), down, down_scale)
    outputs = result.index_select(0, rows.places.clamp(max=rows.capacity - 1))
    combine(outputs, weights, indices, experts, out)
    return out
