"""Cache rows that a kernel selects, judged by fp64 scores: keys that tie may be exchanged."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dsa_compile.verify.execution.exact import WIDE

_ROWS = 64  # whose scores are held at a time


def selection_problem(
    chosen: Tensor, q: Tensor, weights: Tensor, keys: Tensor, batch: Sequence[Any], scale: float
) -> tuple[str, float]:
    """Problem of selected rows or the empty text, and the worst deficit over what is allowed.

    A key may be chosen in place of another whose score is higher by no more than the rounding of
    the two: that of a sum of products in the accumulators of tensor cores.

    Args:
        chosen: int32 ``[T, topk]``, physical rows.
        q: ``[T, H, D]``.
        weights: ``[T, H]``.
        keys: fp64 ``[P * bs, D]``, the cache as numbers.
        batch: block tables, ends of requests, lengths of contexts, rows of a page.
        scale: on dot products.
    """
    tables, ends, lengths, block = batch
    unit = 2.0**-11 if q.dtype is torch.float8_e4m3fn else 2.0**-16
    worst = 0.0
    for request, length in enumerate(lengths.tolist()):
        start, end = int(ends[request]), int(ends[request + 1])
        positions = torch.arange(length, device=q.device)
        slots = tables[request].long()[positions // block] * block + positions % block
        mine = keys[slots]
        for first in range(start, end, _ROWS):
            rows = slice(first, min(first + _ROWS, end))
            seen = length - (end - torch.arange(rows.start, rows.stop, device=q.device)) + 1
            problem, share = _judge(
                chosen[rows].long(), q[rows].to(WIDE), weights[rows].to(WIDE), mine, slots, seen,
                scale, unit,
            )  # fmt: skip
            worst = max(worst, share)
            if problem:
                return problem, worst
    rest = chosen[int(ends[-1]) :]
    return ("selects keys for padding" if bool((rest >= 0).any()) else ""), worst


def _judge(
    chosen: Tensor, q: Tensor, weights: Tensor, keys: Tensor, slots: Tensor, seen: Tensor,
    scale: float, unit: float,
) -> tuple[str, float]:  # fmt: skip
    dots = torch.einsum("nhd,ld->nhl", q, keys) * scale
    sizes = torch.einsum("nhd,ld->nhl", q.abs(), keys.abs()) * scale
    scores = torch.einsum("nh,nhl->nl", weights, dots.relu())
    slack = unit * torch.einsum("nh,nhl->nl", weights.abs(), sizes).amax(-1)
    hidden = torch.arange(len(slots), device=q.device) >= seen[:, None]
    scores.masked_fill_(hidden, -torch.inf)
    wanted = seen.clamp(max=chosen.shape[1])
    if not torch.equal((chosen >= 0).sum(-1), wanted):
        return "selects another number of keys", torch.inf
    place = torch.full((int(max(slots.max(), chosen.max())) + 1,), -1, device=q.device)
    place[slots] = torch.arange(len(slots), device=q.device)
    at = torch.where(chosen >= 0, place[chosen.clamp(min=0)], len(slots))
    if bool((at < 0).any()):
        return "selects rows of another request", torch.inf
    taken = torch.zeros(len(scores), len(slots) + 1, device=q.device, dtype=torch.bool)
    taken = taken.scatter_(1, at, True)[:, :-1]
    if not torch.equal(taken.sum(-1), wanted):
        return "selects a key twice", torch.inf
    cut = scores.sort(-1, descending=True).values.gather(1, wanted[:, None] - 1).squeeze(1)
    lowest = scores.masked_fill(~taken, torch.inf).amin(-1)
    if bool((lowest == -torch.inf).any()):
        return "selects keys that are not visible", torch.inf
    share = ((cut - lowest) / (2 * slack).clamp(min=1e-300)).amax().item()
    return (f"selects keys {share:.1f} roundings below the cut" if share > 1 else ""), share
