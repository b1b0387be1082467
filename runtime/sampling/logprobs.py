"""Log-probabilities of the tokens of a step, from its logits."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dsa_compile.kernels.sampling_layout import MOST_TOP, ROW_LOGPROBS, words
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


def row_logprobs(
    logits: Tensor, places: Tensor, owners: Tensor, tokens: Tensor, top: int
) -> Tensor:
    """Describe a token of each of some rows of logits, and the row's likeliest tokens.

    Equals rank the lowest id first; the rank of a token is one more than the larger logits. On a
    GPU this launches two kernels and waits for nothing.

    Args:
        logits: ``[N, V]``, dense along V; on a GPU fp32 or bf16.
        places: int32 ``[D]``, rows of the logits.
        owners: int32 ``[D]``, where in ``tokens`` each row's token is.
        tokens: int64, each in ``[0, V)``.
        top: how many of the likeliest tokens to list, at most ``MOST_TOP``.

    Returns:
        int32 ``[D, 66]`` beside the logits, a record of ``ROW_LOGPROBS`` a row; see
        :func:`read_logprobs`.
    """
    if logits.device.type != "cpu":
        from dsa_compile.kernels.triton.row_logprobs import row_logprobs as kernel

        return kernel(logits, places, owners, tokens, top)
    rows, chosen = logits[places.long()].float(), tokens[owners.long()]
    out = torch.zeros(len(rows), words(ROW_LOGPROBS), dtype=torch.int32)
    if not len(rows):
        return out
    width = min(top, rows.shape[1])
    own, out[:, 1], ids, values = describe(rows, chosen, width)
    out[:, 0] = own.view(torch.int32)
    out[:, 2 : 2 + width] = ids.int()
    out[:, 2 + MOST_TOP : 2 + MOST_TOP + width] = values.contiguous().view(torch.int32)
    return out


def read_logprobs(
    records: NDArray[np.int32], tokens: Sequence[int], alternatives: Sequence[int]
) -> Iterator[TokenLogprobs]:
    """Unpack what :func:`row_logprobs` gave, on the host.

    Args:
        records: int32 ``[D, 66]``, contiguous.
        tokens: the token of each row.
        alternatives: how many of the likeliest tokens to give of each row; at most as many as were
            listed, ``min(top, V)``.
    """
    rows = records.view(ROW_LOGPROBS)[:, 0]
    own, ranks = rows["logprob"].tolist(), rows["rank"].tolist()
    for place, (token, count) in enumerate(zip(tokens, alternatives, strict=True)):
        row = rows[place]
        ids, values = row["top_ids"][:count].tolist(), row["top_logprobs"][:count].tolist()
        top = tuple((i, v) for i, v in zip(ids, values, strict=True) if v > -np.inf)
        yield TokenLogprobs(token, own[place], ranks[place], top)
