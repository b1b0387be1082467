"""Tokens that a request has seen, on the host and on the device, for penalties."""

from collections.abc import Sequence
from copy import copy

import numpy as np
import torch
from numpy.typing import NDArray

from dsa_compile.kernels.sampling_layout import IN_PROMPT, MOST_COUNTED


class TokenCounts:
    """The distinct tokens of one request and how often each is in its output.

    Kept up to date a token at a time; the arrays grow by doubling. A count stays at
    ``MOST_COUNTED``, 32,767.

    Args:
        prompt_ids: the prompt's tokens, counted 0 times in the output.
    """

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        distinct = np.unique(np.asarray(prompt_ids, dtype=np.int64))
        self._size = self._prompt_size = len(distinct)
        self._slots = dict(zip(distinct.tolist(), range(self._size), strict=True))
        capacity = max(self._size, 8)
        self._ids = np.zeros(capacity, dtype=np.int64)
        self._ids[: self._size] = distinct
        self._counts = np.zeros(capacity, dtype=np.float32)
        self._output: list[int] = []  # the slot of each output token

    def append(self, token: int) -> None:
        """Count one output token."""
        slot = self._slots.setdefault(token, self._size)
        if slot == self._size:
            if self._size == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._ids[slot] = token
            self._size += 1
        self._counts[slot] = np.minimum(self._counts[slot] + 1, MOST_COUNTED)
        self._output.append(slot)

    def changes(self, since: int | None) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Changes from the ``since``-th output token on, or everything if it is None.

        Returns:
            Distinct tokens, and for each its count with ``IN_PROMPT`` where the prompt has it.
        """
        slots = np.arange(self._size) if since is None else np.unique(self._output[since:])
        slots = slots.astype(np.int64)
        states = self._counts[slots].astype(np.int32)
        states[slots < self._prompt_size] |= IN_PROMPT
        return self._ids[slots].astype(np.int32), states

    @property
    def num_output(self) -> int:
        """Output tokens so far."""
        return len(self._output)

    def copy(self) -> "TokenCounts":
        """Copy of the counts that changes independently."""
        other = copy(self)
        other._slots, other._ids = self._slots.copy(), self._ids.copy()
        other._counts, other._output = self._counts.copy(), self._output.copy()
        return other

    @property
    def ids(self) -> NDArray[np.int64]:
        """The distinct tokens, [n]."""
        return self._ids[: self._size]

    @property
    def counts(self) -> NDArray[np.float32]:
        """Times each of :attr:`ids` is in the output, [n]."""
        return self._counts[: self._size]


class SeenTokens:
    """Counts of tokens by the scheduler's row, as far as the host knows them.

    A row follows its request's :class:`TokenCounts`: only what was added since the row was last
    brought up to date is written, as values and not as increments, and all of it where the row
    changed hands. So nothing has to be undone: a step that was given up, a preempted or an aborted
    request leaves at most a row that its next owner clears.

    Attributes:
        table: int16 ``[R, V]``, the count in the output, and ``IN_PROMPT``.
    """

    def __init__(self, rows: int, vocab_size: int, device: torch.device) -> None:
        self.table = torch.zeros((rows, vocab_size), dtype=torch.int16, device=device)
        self._owners: list[TokenCounts | None] = [None] * rows
        self._known = [0] * rows  # tokens of the owner's output that the table has

    def changes(
        self, rows: Sequence[int], counts: Sequence[TokenCounts]
    ) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
        """Updates of the table for these rows: rows, tokens and states, [E] each.

        Call :meth:`written` once that is launched.
        """
        owners, tokens, states = [], [], []
        for row, count in zip(rows, counts, strict=True):
            since: int | None = self._known[row]
            if self._owners[row] is not count:
                self._owners[row] = None  # until all of it is written
                self.table[row].zero_()
                since = None
            new_tokens, new_states = count.changes(since)
            owners.append(np.full(len(new_tokens), row, np.int32))
            tokens.append(new_tokens)
            states.append(new_states)
        if not owners:
            nothing = np.zeros(0, np.int32)
            return nothing, nothing, nothing
        return np.concatenate(owners), np.concatenate(tokens), np.concatenate(states)

    def written(self, rows: Sequence[int], counts: Sequence[TokenCounts]) -> None:
        """Note that the table has all tokens of these rows."""
        for row, count in zip(rows, counts, strict=True):
            self._owners[row] = count
            self._known[row] = count.num_output
