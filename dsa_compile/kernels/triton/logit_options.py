"""Options of requests that change logits: bias, masks and penalties, for the rows that have some.

The changed rows are written apart, in fp32: the model's own logits stay as they are for the other
rows and for log-probabilities. Every operation rounds as the host's does, so the values are equal
to the last bit (no fused multiply-add, division to nearest).
"""

import triton
import triton.language as tl
from torch import Tensor

from dsa_compile.kernels.sampling_layout import MOST_COUNTED, ROW_OPTIONS, words

_BLOCK = 1024
_ENTRIES = 128
_WORDS = tl.constexpr(words(ROW_OPTIONS))
_MOST_COUNTED = tl.constexpr(MOST_COUNTED)
_INFINITY = tl.constexpr(float("inf"))


@triton.jit
def _changed(
    x: tl.tensor,
    token: tl.tensor,
    records: tl.tensor,
    seen: tl.tensor,
    last: tl.tensor,
    bitmasks: tl.tensor,
    vocab: int,
    inside: tl.tensor,
) -> tl.tensor:
    """Mask and penalise biased logits of some tokens; ``records`` points at their row's options."""
    owner = tl.load(records + 1).to(tl.int64)
    bitmask = tl.load(records + 3)
    repetition = tl.load(records + 4).to(tl.float32, bitcast=True)
    presence = tl.load(records + 5).to(tl.float32, bitcast=True)
    frequency = tl.load(records + 6).to(tl.float32, bitcast=True)
    masks = bitmasks + bitmask.to(tl.int64) * ((vocab + 31) // 32)
    word = tl.load(masks + token // 32, tl.where(inside, bitmask, -1) >= 0, -1)
    x = tl.where((word >> (token % 32)) & 1 == 1, x, -_INFINITY)
    state = tl.load(seen + owner * vocab + token, inside, 0).to(tl.int32) & 0xFFFF
    pending = (tl.load(records + 2) == 1) & (token == tl.load(last + owner))
    count = (state & _MOST_COUNTED) + pending.to(tl.int32)
    times = tl.minimum(count, _MOST_COUNTED).to(tl.float32)
    penalised = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition)
    penalised -= frequency * times + tl.where(count > 0, presence, 0.0)
    return tl.where((state != 0) | pending, penalised, x)


@triton.jit
def change_rows_kernel(
    logits: tl.tensor,
    stride: int,
    vocab: int,
    records: tl.tensor,
    seen: tl.tensor,
    last: tl.tensor,
    bitmasks: tl.tensor,
    out: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """``BLOCK`` tokens of a row, without bias."""
    row = tl.program_id(0)
    records += row * _WORDS
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab
    start = logits + tl.load(records).to(tl.int64) * stride
    x = tl.load(start + token, inside, 0.0).to(tl.float32)
    changed = _changed(x, token, records, seen, last, bitmasks, vocab, inside)
    tl.store(out + row.to(tl.int64) * vocab + token, changed, inside)


@triton.jit(do_not_specialize=["count"])
def bias_tokens_kernel(
    logits: tl.tensor,
    stride: int,
    vocab: int,
    records: tl.tensor,
    seen: tl.tensor,
    last: tl.tensor,
    bitmasks: tl.tensor,
    rows: tl.tensor,
    tokens: tl.tensor,
    amounts: tl.tensor,
    out: tl.tensor,
    count: int,
    BLOCK: tl.constexpr,
) -> None:
    """``BLOCK`` tokens with a bias: bias comes before all else, so they are computed again."""
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = entry < count
    row = tl.load(rows + entry, inside, 0)
    token = tl.load(tokens + entry, inside, 0)
    records += row * _WORDS
    place = tl.load(records).to(tl.int64)
    x = tl.load(logits + place * stride + token, inside, 0.0).to(tl.float32)
    x += tl.load(amounts + entry, inside, 0).to(tl.float32, bitcast=True)
    changed = _changed(x, token, records, seen, last, bitmasks, vocab, inside)
    tl.store(out + row.to(tl.int64) * vocab + token, changed, inside)


@triton.jit(do_not_specialize=["count"])
def store_seen_kernel(
    seen: tl.tensor,
    vocab: int,
    rows: tl.tensor,
    tokens: tl.tensor,
    states: tl.tensor,
    count: int,
    BLOCK: tl.constexpr,
) -> None:
    """Store ``BLOCK`` entries of the table."""
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = entry < count
    row = tl.load(rows + entry, inside, 0).to(tl.int64)
    token = tl.load(tokens + entry, inside, 0)
    state = tl.load(states + entry, inside, 0)
    tl.store(seen + row * vocab + token, state.to(tl.int16), inside)


def change_rows(
    logits: Tensor,
    options: Tensor,
    seen: Tensor,
    last_tokens: Tensor,
    bitmasks: Tensor,
    bias: tuple[Tensor, Tensor, Tensor],
    out: Tensor,
) -> None:
    """Apply bias, masks and penalties to some rows of logits.

    Args:
        logits: fp32 or bf16 ``[N, V]``, dense along V.
        options: int32 ``[A, 7]``, a record of
            :data:`~dsa_compile.kernels.sampling_layout.ROW_OPTIONS` a row.
        seen: int16 ``[R, V]``, how often each token is in a request's output, and ``IN_PROMPT``.
        last_tokens: int64 ``[R]``.
        bitmasks: int32 ``[M, ceil(V / 32)]`` of allowed tokens; token t is bit ``t % 32`` of word
            ``t // 32``. At least one word, even if no row has one.
        bias: rows of ``options``, tokens, and amounts by their bits, -inf to mask; int32 ``[B]``
            each, a token once a row.
        out: fp32, at least ``[A, V]``, dense; row i takes the logits of ``options[i]``.
    """
    vocab, rows = logits.shape[1], options.shape[0]
    given = (logits, logits.stride(0), vocab, options, seen, last_tokens, bitmasks)
    change_rows_kernel[(rows, triton.cdiv(vocab, _BLOCK))](
        *given, out, BLOCK=_BLOCK, num_warps=4, enable_fp_fusion=False
    )
    count = bias[0].shape[0]
    if count:
        bias_tokens_kernel[(triton.cdiv(count, _ENTRIES),)](
            *given, *bias, out, count, BLOCK=_ENTRIES, num_warps=4, enable_fp_fusion=False
        )


def store_seen(seen: Tensor, rows: Tensor, tokens: Tensor, states: Tensor) -> None:
    """Write entries of the tokens seen, ``seen[rows, tokens] = states``.

    Args:
        seen: int16 ``[R, V]``.
        rows: int32 ``[E]``.
        tokens: int32 ``[E]``; no entry twice.
        states: int32 ``[E]``, the low 16 bits count.
    """
    count = rows.shape[0]
    if count:
        store_seen_kernel[(triton.cdiv(count, _ENTRIES),)](
            seen, seen.shape[1], rows, tokens, states, count, BLOCK=_ENTRIES, num_warps=4
        )
