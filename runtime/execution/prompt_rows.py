"""Prompt tokens of a step whose logits are wanted, for log-probabilities of the tokens behind them.

Such a step is never launched ahead, so what came of the steps before it is known.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dsa_compile.runtime.generation import Generation
from dsa_compile.runtime.scheduling.request import Request
from dsa_compile.runtime.scheduling.step import ScheduledStep


class Scored(NamedTuple):
    """A request and how many of its prompt's tokens a step scores."""

    request: Request
    tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class PromptRows:
    """P tokens of a step, each with the token that follows it in its prompt.

    Args:
        rows: int64 [P], their places in the batch.
        targets: int64 [P], the tokens behind them, to be scored.
        alternatives: [P], how many of the likeliest tokens to report.
        scored: the requests, in the order of the rows.
    """

    rows: NDArray[np.int64]
    targets: NDArray[np.int64]
    alternatives: Sequence[int]
    scored: Sequence[Scored]


def prompt_rows(step: ScheduledStep, live: Mapping[Request, Generation]) -> PromptRows | None:
    """The prompt tokens whose logits a step has to compute; None if there are none."""
    rows: list[NDArray[np.int64]] = []
    targets: list[NDArray[np.int64]] = []
    alternatives: list[int] = []
    scored: list[Scored] = []
    before = 0
    for request, start, count, _, _ in step.entries:
        first = max(start, request.logits_from)
        end = min(start + count, request.prompt_len - 1)
        if first < end:
            rows.append(np.arange(first, end) + (before - start))
            targets.append(request.token_ids[first + 1 : end + 1])
            most = live[request].sampling.params.prompt_logprobs or 0
            alternatives += [most] * (end - first)
            scored.append(Scored(request, end - first))
        before += count
    if not scored:
        return None
    return PromptRows(np.concatenate(rows), np.concatenate(targets), alternatives, scored)
