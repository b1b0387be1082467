"""The choice of a drafted step's tokens on the host, and the same as arrays for a device."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dsa_compile.runtime.execution.draft_inputs import valid_rows
from dsa_compile.runtime.execution.draft_rows import forced_lengths
from dsa_compile.runtime.execution.runner import StepInputs
from dsa_compile.runtime.sampling.draft_verification import choose_tokens
from dsa_compile.runtime.sampling.sampler import SampledToken, Sampler

Records = NDArray[np.void]
"""Sampling options of a step's tokens, ``[Y]`` records of ``OPTIONS``."""

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


def checked_rows(
    max_new: Sequence[int], width: int, drafted: Tensor, logits: Tensor
) -> CheckedRows:
    """Wait for the logits and drafts of a step.

    Args:
        max_new: rows of each request that yields tokens, [Y].
        width: W, of the grid.
        drafted: int64 ``[Y, W - 1]``.
        logits: ``[Y * W, V]``.
    """
    valid = valid_rows(max_new, width)
    wanted = logits.float().cpu()[torch.from_numpy(valid.ravel())]
    pairs = zip(drafted.tolist(), max_new, strict=True)
    return CheckedRows(wanted, [tokens[: most - 1] for tokens, most in pairs])


def choose_on_host(
    sampler: Sampler, inputs: StepInputs, checked: CheckedRows, per_thousand: int | None
) -> HostChoice:
    """Choose the tokens of a step.

    Args:
        sampler: of the host.
        inputs: the step.
        checked: of all its requests that yield tokens.
        per_thousand: a thousand times the tokens to keep on average; None for those up to the first
            wrong draft.
    """
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
