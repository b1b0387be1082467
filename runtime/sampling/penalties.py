"""Tokens of a request that its penalties look at."""

from collections.abc import Sequence
from copy import copy

import numpy as np
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
