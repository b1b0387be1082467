"""Bias, masks and penalties applied to logits where they are, without waiting for them."""

import torch
from torch import Tensor

from dsa_compile.kernels.sampling_layout import IN_PROMPT, MOST_COUNTED

_STATE = IN_PROMPT | MOST_COUNTED


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
    vocab = logits.shape[1]
    place, row, pending, bitmask = options[:, :4].long().unbind(1)
    repetition, presence, frequency = (
        options[:, 4:].contiguous().view(torch.float32)[..., None].unbind(1)
    )
    x = logits[place].float()
    owners, tokens, amounts = bias
    x.view(-1).index_add_(0, owners.long() * vocab + tokens, amounts.view(torch.float32))
    token = torch.arange(vocab)
    allowed = (bitmasks[bitmask.clamp(min=0)][:, token // 32] >> (token % 32).int()) & 1 == 1
    x = torch.where(allowed | (bitmask < 0)[:, None], x, -torch.inf)
    state = seen[row].int() & _STATE
    unseen = (pending[:, None] == 1) & (token == last_tokens[row][:, None])
    times = ((state & MOST_COUNTED) + unseen).clamp(max=MOST_COUNTED).float()
    penalised = torch.where(x > 0, x / repetition, x * repetition)
    penalised -= frequency * times + presence * (times > 0)
    out[: len(x)] = torch.where((state != 0) | unseen, penalised, x)


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
