"""Log-probabilities of the tokens of a step, from its logits."""

from collections.abc import Sequence

import torch

from dsa_compile.runtime.requests.logprobs import TokenLogprobs
from dsa_compile.runtime.sampling.draw import ordered_top


def token_logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, alternatives: Sequence[int]
) -> list[TokenLogprobs]:
    """Describe the chosen token of each row.

    Args:
        logits: [n, V] fp32, raw; each row has a finite maximum.
        tokens: int64 [n], the chosen tokens.
        alternatives: how many of the likeliest tokens to list for each row.
    """
    chosen = logits.gather(1, tokens[:, None])
    norm = logits.logsumexp(1, keepdim=True)
    ranks = (logits > chosen).sum(1).add_(1).tolist()
    own = (chosen - norm)[:, 0].tolist()
    tops: list[list[tuple[int, float]]] = [[] for _ in alternatives]
    if width := min(max(alternatives), logits.shape[1]):
        values, ids = ordered_top(logits, width)
        tops = [
            [(i, v) for i, v in zip(row_ids[:count], row[:count], strict=True) if v > -torch.inf]
            for row_ids, row, count in zip(
                ids.tolist(), (values - norm).tolist(), alternatives, strict=True
            )
        ]
    return [
        TokenLogprobs(token, logprob, rank, tuple(top))
        for token, logprob, rank, top in zip(tokens.tolist(), own, ranks, tops, strict=True)
    ]
