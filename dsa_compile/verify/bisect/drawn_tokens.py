"""Tokens that each of several ranks draws for itself, held to the logits of the finished graphs.

Steps launched ahead are sent to ranks without their tokens: a rank draws them by the sampling
options that it was sent when a request came to its row. By the options of an earlier request it
draws another token than the first rank, and what ranks sum is wrong from the next step on.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from torch import Tensor

from dsa_compile.runtime.requests.sampling_params import SamplingParams
from dsa_compile.runtime.sampling.draw import uniforms
from dsa_compile.verify.bisect.sampling_options import is_greedy
from dsa_compile.verify.inputs.prompt import random_tokens

ROWS = 2
"""Requests of a lane at once: those that follow take their rows."""

_ON_A_ROW = 2  # requests of a lane, one after the other
_SHORTEST = 6  # tokens of a prompt

_GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
_TURNS = (
    _GREEDY,
    replace(_GREEDY, temperature=1.0, seed=5),
    replace(_GREEDY, temperature=0.5, seed=6),
)
"""Options of requests, in turns: no two that follow one another on a row have the same ones."""


def drawn_requests(
    lanes: int, vocab_size: int
) -> tuple[list[tuple[int, ...]], list[SamplingParams]]:
    """Prompts and their options, more than there are rows for.

    Args:
        lanes: of the layout.
        vocab_size: of the model.
    """
    count = lanes * ROWS * _ON_A_ROW
    prompts = [random_tokens(_SHORTEST + n, vocab_size, seed=100 + n) for n in range(count)]
    return prompts, [_TURNS[n % len(_TURNS)] for n in range(count)]


def drawn_problem(tokens: Sequence[int], params: SamplingParams, rows: Tensor, limit: float) -> str:
    """Problem of a request's tokens, or the empty text.

    Args:
        tokens: behind the prompt.
        params: temperature and seed alone.
        rows: log-probabilities in front of each token, fp64 ``[tokens, V]``.
        limit: of the difference that rounding makes of one.
    """
    for place, (token, row) in enumerate(zip(tokens, rows, strict=True)):
        if not _may_be_drawn(token, place, params, row, limit):
            how = "greedy" if is_greedy(params) else f"temperature {params.temperature}"
            return f"token {place + 1} is {token}, which the finished graphs rule out ({how})"
    return ""


def _may_be_drawn(
    token: int, place: int, params: SamplingParams, row: Tensor, limit: float
) -> bool:
    if is_greedy(params):
        return float(row.max() - row[token]) <= 2 * limit
    assert params.seed is not None
    shares = (row / params.temperature).softmax(-1)
    drawn = float(uniforms(np.array([params.seed], np.uint64), np.array([place], np.uint64)))
    slack = math.expm1(2 * limit / params.temperature)
    end = float(shares[: token + 1].sum())
    return end - float(shares[token]) - slack <= drawn <= end + slack
