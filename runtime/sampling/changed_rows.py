"""Bias, masks and penalties applied to logits where they are, without waiting for them.

:func:`change_logits` says on the CPU what they mean: the host's sampler calls it, and kernels are
held to it.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dsa_compile.kernels.sampling_layout import IN_PROMPT, MOST_COUNTED
from dsa_compile.runtime.sampling.grammar import allowed_by

_STATE = IN_PROMPT | MOST_COUNTED

Entries = tuple[Tensor, Tensor, Tensor]
"""Rows, tokens, and a number for each of these."""


def change_logits(
    logits: Tensor,
    bias: Entries,
    masks: tuple[Sequence[int], NDArray[np.int32]],
    seen: Entries,
    penalties: Tensor,
) -> None:
    """Apply bias, masks and penalties in place, in the order of
    :class:`~dsa_compile.runtime.requests.sampling_params.SamplingParams`.

    Only the tokens that are named are touched: it costs in proportion to these, but for masks.

    Args:
        logits: fp32 ``[N, V]``, dense, on the CPU.
        bias: amounts in fp32, -inf to mask; a token once a row.
        masks: some rows, and a bitmask of allowed tokens for each, ``[m, ceil(V / 32)]``.
        seen: tokens of the prompt and the output, and in fp32 how often each is in the output.
        penalties: fp32 ``[N, 3]``: repetition, presence, frequency.
    """
    vocab, flat = logits.shape[1], logits.view(-1)
    rows, tokens, amounts = bias
    flat.index_add_(0, rows * vocab + tokens, amounts)
    for row, bitmask in zip(*masks, strict=True):
        logits[row].masked_fill_(torch.from_numpy(~allowed_by(bitmask, vocab)), -torch.inf)
    rows, tokens, times = seen
    where = rows * vocab + tokens
    repetition, presence, frequency = penalties[rows].unbind(1)
    values = flat[where]
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= frequency * times + presence * (times > 0)
    flat[where] = values


def entries_of(
    rows: NDArray[np.integer], tokens: NDArray[np.integer], numbers: NDArray[np.float32]
) -> Entries:
    """Entries as :func:`change_logits` takes them."""
    owners, ids = (torch.from_numpy(array).long() for array in (rows, tokens))
    return owners, ids, torch.from_numpy(numbers)


def joined_bias(biases: Sequence[NDArray[np.int32]]) -> NDArray[np.int32]:
    """Rows, tokens, and amounts by their bits, int32 ``[3, B]``, of ``[2, n]`` for each row."""
    rows = np.repeat(np.arange(len(biases), dtype=np.int32), [b.shape[1] for b in biases])
    return np.concatenate([rows[None], np.concatenate(biases, axis=1)])


def change_rows(
    logits: Tensor,
    options: Tensor,
    seen: Tensor,
    last_tokens: Tensor,
    bitmasks: Tensor,
    bias: tuple[Tensor, Tensor, Tensor],
    out: Tensor,
) -> None:
    """Apply bias, masks and penalties to some rows of logits; the logits stay as they are.

    The order is that of :class:`~dsa_compile.runtime.requests.sampling_params.SamplingParams`, and
    values are equal to the last bit wherever this runs.

    Args:
        logits: ``[N, V]``, dense along V; on a GPU fp32 or bf16.
        options: int32 ``[A, 7]``, a record of ``ROW_OPTIONS`` a row.
        seen: int16 ``[R, V]``, how often each token is in a request's output, and ``IN_PROMPT``.
        last_tokens: int64 ``[R]``.
        bitmasks: int32 ``[M, ceil(V / 32)]`` of allowed tokens, M >= 1; token t is bit ``t % 32``
            of word ``t // 32``.
        bias: rows of ``options``, tokens, and amounts by their bits, -inf to mask; int32 ``[B]``
            each, a token once a row.
        out: fp32, at least ``[A, V]``, dense; row i takes the logits of ``options[i]``.
    """
    if logits.device.type != "cpu":
        from dsa_compile.kernels.triton.logit_options import change_rows as kernel

        kernel(logits, options, seen, last_tokens, bitmasks, bias, out)
        return
    place, row, pending, bitmask = options[:, :4].long().unbind(1)
    x = logits[place].float()
    masked = (bitmask >= 0).nonzero().flatten()
    state = seen[row].int() & _STATE
    unseen = torch.zeros_like(state, dtype=torch.bool)
    unseen[torch.arange(len(x)), last_tokens[row]] = pending == 1
    rows, tokens = ((state != 0) | unseen).nonzero().unbind(1)
    times = ((state & MOST_COUNTED) + unseen).clamp(max=MOST_COUNTED)[rows, tokens].float()
    change_logits(
        x,
        (bias[0].long(), bias[1].long(), bias[2].view(torch.float32)),
        (masked.tolist(), bitmasks[bitmask[masked]].numpy()),
        (rows, tokens, times),
        options[:, 4:].contiguous().view(torch.float32),
    )
    out[: len(x)] = x


def store_seen(seen: Tensor, rows: Tensor, tokens: Tensor, states: Tensor) -> None:
    """Write entries of the tokens seen, ``seen[rows, tokens] = states``.

    Args:
        seen: int16 ``[R, V]``.
        rows: int32 ``[E]``.
        tokens: int32 ``[E]``; no entry twice.
        states: int32 ``[E]``, the low 16 bits count.
    """
    if seen.device.type != "cpu":
        from dsa_compile.kernels.triton.logit_options import store_seen as kernel

        kernel(seen, rows, tokens, states)
        return
    seen[rows.long(), tokens.long()] = states.to(torch.int16)
