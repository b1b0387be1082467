"""Meaning of sampling options: the tokens that they leave, and how likely each is."""

from collections.abc import Sequence

import torch
from torch import Tensor

from dsa_compile.runtime.requests.sampling_params import SamplingParams

TIE = 1e-4
"""Logits and probabilities that are closer may be exchanged, unless they are equal."""


def end_tokens(params: SamplingParams, ends: Sequence[int]) -> set[int]:
    """Tokens that end a request, given the model's own."""
    return {*params.stop_token_ids, *(() if params.ignore_eos else ends)}


def is_greedy(params: SamplingParams) -> bool:
    """Whether the likeliest token is taken."""
    return params.temperature < 1e-5


def allowed_tokens(
    logits: Tensor,
    params: SamplingParams,
    prompt: Sequence[int],
    made: Sequence[int],
    ends: Sequence[int],
) -> set[int]:
    """Tokens that may come next: the definition of every option, one after the other.

    Args:
        logits: [V], the model's own.
        params: the request's.
        prompt: its token ids.
        made: the tokens before this one.
        ends: the model's end tokens.
    """
    row = _with_token_options(logits, params, prompt, made, ends)
    if is_greedy(params):
        near = (row >= row.max() - TIE).nonzero().flatten().flip(0)
        of_value = dict(zip(row[near].tolist(), near.tolist(), strict=True))
        return set(of_value.values())  # of equal ones the lowest
    return set(_kept(row, params, TIE).nonzero().flatten().tolist())


def probabilities(
    logits: Tensor,
    params: SamplingParams,
    prompt: Sequence[int],
    made: Sequence[int],
    ends: Sequence[int],
) -> Tensor:
    """Probability of each token to come next, fp64 [V]; arguments as above, not greedy."""
    row = _with_token_options(logits, params, prompt, made, ends)
    weights = torch.where(_kept(row, params, 0.0), (row / params.temperature).softmax(-1), 0.0)
    return weights / weights.sum()


def _with_token_options(
    logits: Tensor,
    params: SamplingParams,
    prompt: Sequence[int],
    made: Sequence[int],
    ends: Sequence[int],
) -> Tensor:
    """Logits with bias, masks and penalties, fp64 [V]."""
    row = logits.double().clone()
    for token, amount in (params.logit_bias or {}).items():
        row[token] += amount
    if len(made) < params.min_tokens:
        row[list(end_tokens(params, ends))] = -torch.inf
    if params.repetition_penalty != 1.0:
        for token in {*prompt, *made}:
            down = row[token] > 0
            penalty = params.repetition_penalty
            row[token] = row[token] / penalty if down else row[token] * penalty
    for token in set(made):
        row[token] -= params.presence_penalty + params.frequency_penalty * made.count(token)
    return row


def _kept(row: Tensor, params: SamplingParams, tie: float) -> Tensor:
    """Tokens that the filters keep, bool [V]; of equal ones the lowest ids come first."""
    weights = (row / params.temperature).softmax(-1)
    kept = (weights > 0) & (weights >= params.min_p * weights.max() * (1 - tie))
    order = row.argsort(descending=True, stable=True)
    if 0 < params.top_k < len(row):
        last = order[params.top_k - 1]
        first = torch.zeros_like(kept)
        first[order[: params.top_k]] = True
        near = (weights - weights[last]).abs() <= tie * weights[last]
        kept &= first | near & (row != row[last])
    weights = torch.where(kept, weights, 0.0)
    before = torch.zeros_like(weights)
    before[order] = weights[order].cumsum(0) - weights[order]
    return kept & (before < params.top_p * weights.sum() + tie)
