"""Tokens that each running request has seen, on the device, for penalties."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from dsa_compile.runtime.sampling.penalties import TokenCounts


class SeenTokens:
    """Counts of tokens by the scheduler's row, as far as the host knows them.

    A row follows its request's :class:`TokenCounts`: only what was added since the row was last
    brought up to date is written, as values and not as increments, and all of it where the row
    changed hands. So nothing has to be undone: a step that was given up, a preempted or an aborted
    request leaves at most a row that its next owner clears.

    Args:
        rows: R.
        vocab_size: V.
        device: of the table.

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
