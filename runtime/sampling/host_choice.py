"""Choosing the tokens of a step on the host: of each request as many as its drafts are right, and
one more.

A token is a function of its logits and of what sampling remembers of its request. So every row is
sampled as if nothing had been drafted, and rows count up to the first whose token is not its draft:
the rows behind that saw a wrong token. With any options, output is the same as without drafts.
Without drafts each request has one row.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dsa_compile.runtime.execution.draft_rows import forced_lengths
from dsa_compile.runtime.execution.runner import LaunchedTokens, ReadTokens, StepInputs, StepTokens
from dsa_compile.runtime.requests.logprobs import TokenLogprobs
from dsa_compile.runtime.sampling.sampler import SampledToken, Sampler, SamplingState
from dsa_compile.runtime.scheduling.step import Failure

Observer = Callable[[Tensor, Sequence[Sequence[int]], Sequence[Sequence[SampledToken]]], None]
"""Takes what a step has checked: fp32 logits ``[sum(max_new), V]`` of each request's last token and
its drafts, the drafts of each request, and the tokens that it yields."""

Chosen = tuple[NDArray[np.int64], NDArray[np.int64]]
"""Tokens of a step, ``[Y, W]``, and how many of them count of each request, ``[Y]``."""


@dataclass(frozen=True)
class CheckedRows:
    """Logits and options that the tokens of a step are chosen from.

    Attributes:
        logits: fp32 ``[sum(max_new), V]`` on the CPU, of each request's last token and its drafts.
        drafts: of each request.
    """

    logits: Tensor
    drafts: Sequence[Sequence[int]]


@dataclass(frozen=True)
class HostChoice:
    """Tokens of a step that the host has chosen.

    Attributes:
        chosen: the tokens that each request yields.
        sampled: int64 ``[Y, W]``, the same padded with 0.
        kept: int64 ``[Y]``, how many of them count.
    """

    chosen: Sequence[Sequence[SampledToken]]
    sampled: NDArray[np.int64]
    kept: NDArray[np.int64]

    def tokens(self, prompt: Sequence[TokenLogprobs] = ()) -> StepTokens:
        """Yield of the step, with the log-probabilities of its prompt tokens."""
        return replace(step_tokens(self.chosen), prompt_logprobs=prompt)


def choose_tokens(
    sampler: Sampler,
    logits: Tensor,
    states: Sequence[SamplingState],
    max_new: Sequence[int],
    drafts: Sequence[Sequence[int]],
    lengths: Sequence[int] | None = None,
) -> list[list[SampledToken]]:
    """Choose 1 to ``max_new`` tokens for each of Y requests.

    Args:
        sampler: chooses one a row.
        logits: fp32 ``[sum(max_new), V]`` on the CPU: of each request's last token and its drafts.
        states: of the requests; not changed.
        max_new: rows of each.
        drafts: for each, ``max_new - 1`` tokens.
        lengths: tokens to choose for each as long as none fails or ends it, whatever its drafts;
            None for those up to the first that is not its draft.

    Returns:
        For each request its tokens, or a single one that failed.
    """
    starts = np.cumsum([0, *max_new])
    chosen: list[list[SampledToken]] = [[] for _ in states]
    forced: Sequence[int | None] = [None] * len(states) if lengths is None else lengths
    ahead = list(states)  # each as the tokens accepted so far make it
    going, depth = list(range(len(states))), 0
    while going:
        places = [int(starts[i]) + depth for i in going]
        rows = logits if len(places) == len(logits) else logits[places]
        sampled = sampler.sample(rows, [ahead[i] for i in going])
        going = [
            i
            for i, token in zip(going, sampled, strict=True)
            if _goes_on(chosen[i], token, states[i], drafts[i], forced[i])
        ]
        for i in going:
            if depth == 0:
                ahead[i] = states[i].fork()
            ahead[i].append(chosen[i][-1].token_id)
        depth += 1
    return chosen


def _goes_on(
    chosen: list[SampledToken],
    token: SampledToken,
    state: SamplingState,
    drafts: Sequence[int],
    length: int | None,
) -> bool:
    """Keep a token; whether the row behind it counts."""
    if token.failed is not None and chosen:
        return False  # the next step meets the same row, as the first of its request
    chosen.append(token)
    place = len(chosen) - 1
    if place >= len(drafts) or token.failed is not None:
        return False
    right = token.token_id == drafts[place] if length is None else len(chosen) < length
    return right and token.token_id not in state.end_ids


def step_tokens(chosen: Sequence[Sequence[SampledToken]]) -> StepTokens:
    """Yield of a step, from the tokens of its requests."""
    results = [
        [token.token_id for token in tokens]
        if tokens[0].failed is None
        else Failure(tokens[0].failed)
        for tokens in chosen
    ]
    logprobs = {
        place: [token.logprob for token in tokens if token.logprob is not None]
        for place, tokens in enumerate(chosen)
        if tokens[0].logprob is not None
    }
    return StepTokens(results, logprobs)


def choose_on_host(
    sampler: Sampler, inputs: StepInputs, checked: CheckedRows, per_thousand: int | None
) -> HostChoice:
    """Choose the tokens of a step."""
    lengths: Sequence[int] | None = None
    if per_thousand is not None:
        counts = torch.tensor(inputs.counts, dtype=torch.int64)
        lengths = forced_lengths(counts, per_thousand).tolist()
    chosen = choose_tokens(
        sampler, checked.logits, inputs.states, inputs.max_new, checked.drafts, lengths
    )
    sampled = np.zeros((len(chosen), max(inputs.max_new, default=1)), np.int64)
    for place, some in enumerate(chosen):
        sampled[place, : len(some)] = [max(token.token_id, 0) for token in some]
    kept = np.array([len(some) for some in chosen], np.int64)
    return HostChoice(chosen, sampled, kept)


def known_tokens(
    sampler: Sampler, logits: Tensor, inputs: StepInputs, prompt: Sequence[TokenLogprobs] = ()
) -> LaunchedTokens:
    """Choose the tokens of a step without drafts."""
    checked = CheckedRows(logits, [()] * len(inputs.states))
    tokens = choose_on_host(sampler, inputs, checked, None).tokens(prompt)
    return ReadTokens(lambda: tokens)
