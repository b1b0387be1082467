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
    width = min(max(alternatives), logits.shape[1])
    own, ranks, ids, values = (found.tolist() for found in describe(logits, tokens, width))
    entries = []
    for row, (token, count) in enumerate(zip(tokens.tolist(), alternatives, strict=True)):
        likeliest = zip(ids[row][:count], values[row][:count], strict=True)
        top = tuple((i, v) for i, v in likeliest if v > -torch.inf)
        entries.append(TokenLogprobs(token, own[row], ranks[row], top))
    return entries


def describe(
    logits: torch.Tensor, tokens: torch.Tensor, width: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A token of each row of logits, and the row's likeliest tokens.

    Equals rank the lowest id first; the rank of a token is one more than the larger logits.

    Args:
        logits: fp32 ``[n, V]`` on the CPU or a GPU.
        tokens: int64 ``[n]``.
        width: how many of the likeliest tokens to list, at most V.

    Returns:
        The tokens' log-probabilities and ranks ``[n]``; ids of the likeliest and their
        log-probabilities ``[n, width]``.
    """
    chosen = logits.gather(1, tokens[:, None])
    norm = logits.logsumexp(1, keepdim=True)
    ranks = (logits > chosen).sum(1).add_(1)
    values, ids = logits[:, :0], tokens[:, None][:, :0]
    if width:
        values, ids = ordered_top(logits, width)
    return (chosen - norm)[:, 0], ranks, ids, values - norm
