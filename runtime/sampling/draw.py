"""Choosing a token from logits by records of options: what the sampling kernel is held to.

A token is drawn from filtered logits by one uniform number a row.

Inverse-CDF sampling: the token is the first whose cumulative weight passes ``u`` times the kept
mass. Next to a Gumbel race it needs one random number a row rather than one a token, so the number
can come from a counter (seed, step): a request carries no generator state, and its tokens do not
depend on the rows beside it. Sums run in fp64.
"""

import numpy as np
import torch
from numpy.typing import NDArray

# SplitMix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", 2014).
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
# 52 bits, not 53: u * mass then always rounds below mass, so a token of weight 0 is never reached.
_UNIT = 2.0**-52
TOP_P_UNITS = 2.0**64
"""``OPTIONS`` count ``top_p`` in so many parts of 1."""
# A nucleus is nearly always this narrow; wider ones are looked for in growing steps.
_FIRST_WIDTH = 256
_WIDTH_GROWTH = 16
# Entries summed at once where the whole vocabulary is drawn from.
_GROUP = 128


def choose(
    logits: torch.Tensor, records: NDArray[np.void], *, overwrite: bool = False
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Choose a token for each row of logits on the CPU.

    Args:
        logits: fp32 ``[N, V]``.
        records: ``[N]`` of ``OPTIONS``.
        overwrite: whether the logits may be changed, which saves a copy.

    Returns:
        The tokens ``[N]``, and whether the row has a finite maximum, without which its token means
        nothing.
    """
    tokens, good = argmax(logits)
    drawn = np.flatnonzero(good & (records["temperature"] > 0))
    if len(drawn):
        chosen = records[drawn]
        whole = overwrite and len(drawn) == len(logits)
        scaled = logits if whole else logits[torch.from_numpy(drawn)]
        # Shifting by the maximum first keeps small temperatures from overflowing.
        scaled.sub_(scaled.amax(1, keepdim=True))
        scaled.div_(torch.from_numpy(chosen["temperature"].copy())[:, None])
        top_p = chosen["top_p"] / TOP_P_UNITS
        tokens[drawn] = draw(
            scaled,
            torch.from_numpy(chosen["top_k"].astype(np.int64)),
            torch.from_numpy(np.where(top_p > 0, top_p, 1.0)),
            torch.from_numpy(np.exp(chosen["floor"].astype(np.float64))),
            uniforms(chosen["seed"].copy(), chosen["step"].copy()),
        ).numpy()
    return tokens, good


def argmax(logits: torch.Tensor) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Lowest index of each row's maximum, and whether that maximum is finite.

    NumPy's argmax returns the first NaN where there is one, so one look at the value it points to
    finds NaN and infinities anywhere in the row; it is also the vectorised one on CPUs.
    """
    rows = logits.numpy()
    best = rows.argmax(axis=1)
    return best, np.isfinite(rows[np.arange(len(rows)), best])


def uniforms(seeds: NDArray[np.uint64], steps: NDArray[np.uint64]) -> torch.Tensor:
    """The ``steps``-th number in [0, 1) of each seed's stream; float64 [n]."""
    # Mixing the seed first keeps the streams of neighbouring seeds from being shifts of another.
    bits = _mix(_mix(seeds) + (steps + np.uint64(1)) * _GAMMA)
    return torch.from_numpy((bits >> np.uint64(12)).astype(np.float64) * _UNIT)


def ordered_top(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest of each row, largest first, equals by lowest index.

    Args:
        logits: [n, V]; -inf is allowed, and the order among -inf is arbitrary.
        k: how many, 1 <= k <= V.

    Returns:
        values [n, k] and their indices, int64 [n, k].
    """
    if k == logits.shape[1]:
        values, ids = logits.sort(dim=1, descending=True, stable=True)
        return values, ids
    # One more than asked for shows whether the cut runs through a group of equal values.
    values, ids = logits.topk(k + 1, dim=1)
    edge = values[:, k - 1]
    torn = ((values[:, k] == edge) & edge.isfinite()).nonzero().flatten().tolist()
    values, ids = values[:, :k], ids[:, :k]
    for row in torn:
        equal = (values[row] == edge[row]).nonzero().flatten()
        ids[row, equal] = (logits[row] == edge[row]).nonzero().flatten()[: len(equal)]
    ids, by_id = ids.sort(dim=1)
    values, by_value = values.gather(1, by_id).sort(dim=1, descending=True, stable=True)
    return values, ids.gather(1, by_value)


def draw(
    scaled: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    u: torch.Tensor,
) -> torch.Tensor:
    """Filter each row by min-p, top-k and top-p, and draw a token from what is kept.

    Args:
        scaled: [n, V] fp32 logits over temperature, shifted so that each row's maximum is 0;
            overwritten.
        top_k: int64 [n], in [1, V]; V keeps all.
        top_p: float64 [n], in (0, 1].
        min_p: float64 [n], in [0, 1].
        u: float64 [n], in [0, 1).

    Returns:
        Token ids, int64 [n].
    """
    if bool((min_p > 0).any()):
        # p >= min_p * max(p) in logarithms; a row's maximum is 0.
        floor = min_p.log().to(scaled.dtype)[:, None]
        scaled.masked_fill_(scaled < floor, -torch.inf)
    tokens = torch.empty_like(top_k)
    by_count = top_k < scaled.shape[1]
    by_mass = ~by_count & (top_p < 1)
    for rows, pick in (
        (by_count, _draw_top_k),
        (by_mass, _draw_top_p),
        (~by_count & ~by_mass, _draw_all),
    ):
        picked = rows.nonzero().flatten()
        if len(picked):
            part = scaled if len(picked) == len(scaled) else scaled[picked]
            tokens[picked] = pick(part, top_k[picked], top_p[picked], u[picked])
    return tokens


def _draw_all(
    scaled: torch.Tensor, _top_k: torch.Tensor, _top_p: torch.Tensor, u: torch.Tensor
) -> torch.Tensor:
    # A running sum over the vocabulary is slow: find the group by its sum, then look inside it.
    weights = scaled.exp_()
    cdf = _group_sums(weights).cumsum_(1)
    target = u * cdf[:, -1]
    group = _invert(cdf, target)[:, None]
    before = torch.where(group > 0, cdf.gather(1, (group - 1).clamp_(min=0)), 0.0)
    start = group * _GROUP
    members = start + torch.arange(_GROUP)
    inside = weights.gather(1, members.clamp(max=weights.shape[1] - 1)).double()
    inside = inside.masked_fill_(members >= weights.shape[1], 0.0).cumsum_(1)
    # Group and members are summed in different orders; rounding must not step past the last weight.
    last = torch.searchsorted(inside, inside[:, -1:].contiguous())
    at = torch.searchsorted(inside, target[:, None] - before, right=True)
    return (start + torch.minimum(at, last))[:, 0]


def _group_sums(weights: torch.Tensor) -> torch.Tensor:
    """Sums of each run of ``_GROUP`` entries (the last may be shorter); float64 [n, groups]."""
    whole = weights.shape[1] // _GROUP * _GROUP
    runs = weights[:, :whole].view(len(weights), -1, _GROUP)
    sums = runs.sum(2, dtype=torch.float64)
    if whole == weights.shape[1]:
        return sums
    rest = weights[:, whole:].sum(1, keepdim=True, dtype=torch.float64)
    return torch.cat([sums, rest], dim=1)


def _draw_top_k(
    scaled: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, u: torch.Tensor
) -> torch.Tensor:
    values, ids = ordered_top(scaled, int(top_k.max()))
    cdf = values.exp().cumsum(1, dtype=torch.float64)
    mass = cdf.gather(1, top_k[:, None] - 1)
    return ids.gather(1, _draw_nucleus(cdf, top_p[:, None] * mass, mass, u)[:, None])[:, 0]


def _draw_top_p(
    scaled: torch.Tensor, _top_k: torch.Tensor, top_p: torch.Tensor, u: torch.Tensor
) -> torch.Tensor:
    mass = _group_sums(scaled.exp()).sum(1, keepdim=True)
    goal = top_p[:, None] * mass
    tokens = torch.empty_like(u, dtype=torch.int64)
    todo = torch.arange(len(u))
    width = _FIRST_WIDTH
    while len(todo):
        width = min(width, scaled.shape[1])
        values, ids = ordered_top(scaled[todo], width)
        cdf = values.exp().cumsum(1, dtype=torch.float64)
        wide_enough = (cdf[:, -1] >= goal[todo, 0]) | (width == scaled.shape[1])
        done = todo[wide_enough]
        at = _draw_nucleus(cdf[wide_enough], goal[done], mass[done], u[done])
        tokens[done] = ids[wide_enough].gather(1, at[:, None])[:, 0]
        todo = todo[~wide_enough]
        width *= _WIDTH_GROWTH
    return tokens


def _draw_nucleus(
    cdf: torch.Tensor, goal: torch.Tensor, mass: torch.Tensor, u: torch.Tensor
) -> torch.Tensor:
    """Index [n] drawn among the first entries whose mass [n, 1] reaches ``goal`` [n, 1]."""
    last = torch.searchsorted(cdf, goal).clamp_(max=cdf.shape[1] - 1)
    return _invert(cdf, u * torch.minimum(cdf.gather(1, last), mass)[:, 0])


def _invert(cdf: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """First index of each row whose cumulative weight is above the target."""
    return torch.searchsorted(cdf, target[:, None], right=True)[:, 0]


def _mix(bits: NDArray[np.uint64]) -> NDArray[np.uint64]:
    bits = (bits ^ (bits >> np.uint64(30))) * _MIX_1
    bits = (bits ^ (bits >> np.uint64(27))) * _MIX_2
    return bits ^ (bits >> np.uint64(31))
