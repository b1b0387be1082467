"""Sampling options of requests, as records that a sampling kernel reads."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dsa_compile.kernels.cuda.sample_tokens import OPTIONS, sample_tokens
from dsa_compile.runtime.sampling.draw import choose
from dsa_compile.runtime.sampling.sampler import SamplingState

Records = NDArray[np.void]
"""Sampling options of a step's tokens, ``[Y]`` records of ``OPTIONS``."""


def records_of(
    rows: Sequence[int], states: Sequence[SamplingState], counts: Sequence[int]
) -> Records:
    """Records of requests, each in its row of the scheduler, for the tokens behind ``counts``."""
    made = np.frombuffer(bytearray(b"".join([state.record for state in states])), OPTIONS)
    made["row"], made["step"] = rows, counts
    return made


def sample_rows(logits: Tensor, options: Tensor) -> Tensor:
    """Choose a token for each row of logits, without waiting for it.

    Args:
        logits: ``[N, V]``; on a GPU fp32 or bf16.
        options: int64 ``[N, 5]``, records of ``OPTIONS`` that name no row of last tokens.

    Returns:
        int64 ``[N]``, -1 where a row holds NaN or +inf, or nothing finite.
    """
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    _sample(logits, options, tokens, tokens)
    return tokens


def sample_into(kept: Tensor, logits: Tensor, options: Tensor) -> None:
    """Choose a token for each row of logits and keep it, without waiting for it.

    Args:
        kept: int64 ``[R]``; the entry that a record names takes its row's token, 0 if it has none.
            Where records name one entry, any of their tokens stays.
        logits: as for :func:`sample_rows`.
        options: int64 ``[N, 5]``, records of ``OPTIONS``.
    """
    _sample(logits, options, kept, torch.empty_like(options[:, 0]))


def _sample(logits: Tensor, options: Tensor, kept: Tensor, tokens: Tensor) -> None:
    if not len(logits):
        return
    if logits.is_cuda:
        sample_tokens(logits, options.contiguous().view(torch.uint8).view(-1), kept, tokens)
        return
    records = options.contiguous().numpy().view(OPTIONS)[:, 0]
    assert kept is not tokens or (records["row"] < 0).all(), "a record that names a row"
    sample_on_host(logits, records, kept, tokens)


def sample_on_host(logits: Tensor, records: NDArray[np.void], last: Tensor, out: Tensor) -> None:
    """CPU variant of :func:`~dsa_compile.kernels.cuda.sample_tokens.sample_tokens`."""
    tokens, good = choose(logits.float(), records)
    out[: len(tokens)] = torch.from_numpy(np.where(good, tokens, -1))
    kept = records["row"] >= 0
    rows = torch.from_numpy(records["row"][kept].astype(np.int64))
    last[rows] = torch.from_numpy(np.where(good, tokens, 0)[kept])


STEP = 4
"""The word of a record of sampling options that counts a request's tokens."""

ROW = 0
"""The word of 32 bits of such a record that says where its token is kept."""


def options_at(options: Tensor, ahead: Tensor | int) -> Tensor:
    """Records of sampling options for tokens that are ``ahead`` behind those of the records."""
    made = options.clone()
    made[..., STEP] += ahead
    return made


def options_of_drafts(options: Tensor, ahead: Tensor | int, rows: Tensor) -> Tensor:
    """Variant of :func:`options_at` for records ``[Y, 5]`` whose tokens are kept in ``rows``."""
    made = options_at(options, ahead)
    made.view(torch.int32)[:, ROW] = rows
    return made
