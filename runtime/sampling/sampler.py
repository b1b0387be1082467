"""Choosing the next token of every request of a batch from its logits."""

import math
import secrets
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from dsa_compile.errors import RequestError
from dsa_compile.kernels.cuda.sample_tokens import OPTIONS
from dsa_compile.runtime.requests.logprobs import TokenLogprobs
from dsa_compile.runtime.requests.sampling_params import SamplingParams
from dsa_compile.runtime.sampling.changed_rows import change_logits, entries_of, joined_bias
from dsa_compile.runtime.sampling.draw import TOP_P_UNITS, argmax, choose
from dsa_compile.runtime.sampling.grammar import GrammarState, bitmasks_of
from dsa_compile.runtime.sampling.logprobs import token_logprobs
from dsa_compile.runtime.sampling.seen_tokens import TokenCounts

# Rows are worked on this many logits at a time (16 MB of fp32), which bounds the copies.
_CHUNK_LOGITS = 1 << 22

BAD_LOGITS = "the model's logits hold NaN or +inf, or no finite value"
NOTHING_LEFT = (
    "the request's sampling options leave no token with a finite logit, or its grammar is too slow"
)


class SampledToken(NamedTuple):
    """One row's choice.

    Args:
        token_id: the token, or -1 when the row failed.
        logprob: its log-probabilities, when the request asks for them.
        failed: why no token could be chosen, or None.
    """

    token_id: int
    logprob: TokenLogprobs | None = None
    failed: str | None = None


class SamplingState:
    """Sampling state of one request; lives as long as the request, preempted or not.

    Args:
        params: the request's options.
        prompt_ids: its prompt's tokens, each in [0, vocab_size).
        eos_ids: the model's own end tokens.
        vocab_size: V.
        grammar: the state of ``params.grammar``, compiled.

    Attributes:
        generated: tokens so far.
        record: bytes of ``OPTIONS``, how a token is drawn; without its row and its step.
        special: whether a token may take more than temperature and filters: bias, penalties, masks,
            a grammar, log-probabilities.
        plain: whether the next token is the argmax and nothing else.
        counts: tokens that penalties look at, or None.

    Raises:
        RequestError: a biased token or a stop token is outside the vocabulary.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        eos_ids: Iterable[int],
        vocab_size: int,
        grammar: GrammarState | None = None,
    ) -> None:
        bias = params.logit_bias or {}
        for name, ids in (("logit_bias", bias), ("stop_token_ids", params.stop_token_ids)):
            for token in ids:
                if token >= vocab_size:
                    raise RequestError(
                        f"sampling parameter {name} names token {token}; "
                        f"the model's ids are 0 to {vocab_size - 1}"
                    )
        self.params = params
        self.grammar = grammar
        self.generated = 0
        seed = secrets.randbits(64) if params.seed is None else params.seed
        record = np.zeros((), OPTIONS)
        record["seed"] = seed % 2**64
        record["top_k"] = min(params.top_k, vocab_size) if params.top_k > 0 else vocab_size
        record["temperature"] = 0.0 if params.greedy else params.temperature
        record["floor"] = math.log(params.min_p) if params.min_p > 0 else -math.inf
        record["top_p"] = max(1, int(params.top_p * TOP_P_UNITS)) if params.top_p < 1 else 0
        self.record = record.tobytes()
        ends = sorted(t for t in params.end_ids(eos_ids) if t < vocab_size)
        self.end_ids = np.array(ends, dtype=np.int64)
        self.penalties = (
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
        )
        self.counts: TokenCounts | None = None
        if self.penalties != (1.0, 0.0, 0.0):
            # Only the repetition penalty looks at the prompt.
            self.counts = TokenCounts(prompt_ids if self.penalties[0] != 1.0 else ())
        self._altered = bool(bias) or self.counts is not None or grammar is not None
        self._last_mask = params.min_tokens if ends else 0
        self._bias, self._bias_and_mask = _sparse_bias(bias, ends)
        self.special = self._altered or self._last_mask > 0 or params.logprobs is not None
        self._note_progress()

    def alters_logits(self, count: int) -> bool:
        """Whether bias, masks or penalties apply to the token that follows ``count`` others."""
        return self._altered or count < self._last_mask

    def bias_of(self, count: int) -> NDArray[np.int32]:
        """Bias of the token that follows ``count`` others: ids and amounts by their bits, int32
        ``[2, n]``; -inf where ``min_tokens`` masks an end token."""
        return self._bias_and_mask if count < self._last_mask else self._bias

    def append(self, token: int) -> None:
        """Take note of the next output token."""
        self.generated += 1
        if self.counts is not None:
            self.counts.append(token)
        if self.grammar is not None:
            self.grammar.append(token)
        if self.generated <= self._last_mask:
            self._note_progress()

    def fork(self) -> "SamplingState":
        """Copy of the state, to append other tokens to."""
        other = copy(self)
        if self.counts is not None:
            other.counts = self.counts.copy()
        if self.grammar is not None:
            other.grammar = self.grammar.fork()
        return other

    def _note_progress(self) -> None:
        self.plain = (
            self.params.greedy
            and self.params.logprobs is None
            and not self.alters_logits(self.generated)
        )


def _sparse_bias(
    bias: Mapping[int, float], ends: Sequence[int]
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Bias without and with end tokens masked, as :meth:`SamplingState.bias_of` gives it."""

    def packed(amounts: Mapping[int, float]) -> NDArray[np.int32]:
        values = np.array(list(amounts.values()), np.float32).view(np.int32)
        return np.stack([np.array(list(amounts), np.int32), values])

    return packed(bias), packed({**bias, **dict.fromkeys(ends, -np.inf)})


class Sampler:
    """Chooses tokens for a batch.

    Rows that only take the argmax cost one pass over the logits. The others are worked on together
    in bounded groups. A row's choice is a function of its logits and its state alone.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._chunk_rows = max(1, _CHUNK_LOGITS // vocab_size)

    def sample(self, logits: torch.Tensor, states: Sequence[SamplingState]) -> list[SampledToken]:
        """Choose a token for each row; the states are not changed.

        Args:
            logits: [N, V] fp32 on the CPU; -inf marks an impossible token. Not changed.
            states: one for each row. Call :meth:`SamplingState.append` with the token kept.

        Returns:
            One choice a row. A row with NaN, +inf or nothing finite fails alone.
        """
        assert logits.shape == (len(states), self._vocab_size), (logits.shape, len(states))
        assert logits.dtype == torch.float32, logits.dtype
        if not states:
            return []
        best, finite = argmax(logits)
        if finite.all() and all(state.plain for state in states):
            return [SampledToken(token) for token in best.tolist()]
        chosen = [
            SampledToken(token) if ok else SampledToken(-1, None, BAD_LOGITS)
            for token, ok in zip(best.tolist(), finite.tolist(), strict=True)
        ]
        rest = [i for i, state in enumerate(states) if finite[i] and not state.plain]
        for start in range(0, len(rest), self._chunk_rows):
            rows = rest[start : start + self._chunk_rows]
            raw = logits[rows]
            for row, token in zip(rows, _choose(raw, [states[i] for i in rows]), strict=True):
                chosen[row] = token
        return chosen


def _choose(raw: torch.Tensor, states: Sequence[SamplingState]) -> list[SampledToken]:
    """Choose for rows [n, V] with a finite maximum; ``raw`` may be overwritten."""
    wanted = [i for i, state in enumerate(states) if state.params.logprobs is not None]
    # logprobs describe the raw rows: keep them apart from what the options do to the logits.
    described = raw[wanted] if wanted else None
    if any(state.alters_logits(state.generated) for state in states):
        _change(raw, states)
    records = np.frombuffer(bytearray(b"".join([state.record for state in states])), OPTIONS)
    records["step"] = [state.generated for state in states]
    tokens, finite = choose(raw, records, overwrite=True)
    logprobs: list[TokenLogprobs | None] = [None] * len(states)
    if described is not None:
        counts = [states[i].params.logprobs or 0 for i in wanted]
        theirs = torch.from_numpy(tokens[wanted])
        for i, entry in zip(wanted, token_logprobs(described, theirs, counts), strict=True):
            logprobs[i] = entry
    return [
        SampledToken(token, logprob) if ok else SampledToken(-1, None, NOTHING_LEFT)
        for token, logprob, ok in zip(tokens.tolist(), logprobs, finite.tolist(), strict=True)
    ]


def _change(logits: torch.Tensor, states: Sequence[SamplingState]) -> None:
    """Apply the options of states to their rows of logits, in place."""
    rows, tokens, bits = joined_bias([state.bias_of(state.generated) for state in states])
    counted = [(i, state.counts) for i, state in enumerate(states) if state.counts is not None]
    ids = [counts.ids for _, counts in counted] or [np.zeros(0, np.int64)]
    times = [counts.counts for _, counts in counted] or [np.zeros(0, np.float32)]
    owners = np.repeat([i for i, _ in counted] or [0], [len(some) for some in ids])
    change_logits(
        logits,
        entries_of(rows, tokens, bits.view(np.float32)),
        bitmasks_of([state.grammar for state in states], logits.shape[1]),
        entries_of(owners, np.concatenate(ids), np.concatenate(times)),
        torch.tensor([state.penalties for state in states]),
    )
