"""Choosing the tokens of requests with drafts: as many of them as are right, and the one behind.

A token is a function of its logits and of what sampling remembers of its request. So every row is
sampled as if nothing had been drafted, and rows count up to the first whose token is not its draft:
the rows behind that saw a wrong token. With any options, output is the same as without drafts.
"""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from dsa_compile.runtime.execution.runner import StepTokens
from dsa_compile.runtime.sampling.sampler import SampledToken, Sampler, SamplingState
from dsa_compile.runtime.scheduling.step import Failure


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
        rows = logits[[int(starts[i]) + depth for i in going]]
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
