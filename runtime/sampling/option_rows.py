"""Rows of logits as their requests' options want them, made where the logits are."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from dsa_compile.kernels.sampling_layout import ROW_OPTIONS, words
from dsa_compile.runtime.execution.pinned_staging import uploads_to
from dsa_compile.runtime.execution.runner import StepInputs
from dsa_compile.runtime.sampling.changed_rows import change_rows, joined_bias, store_seen
from dsa_compile.runtime.sampling.grammar import bitmasks_of
from dsa_compile.runtime.sampling.seen_tokens import SeenTokens

# Rows that are changed at once; a step with more takes several turns.
_MOST_ROWS = 64


class OptionRows:
    """Applies bias, masks and penalties to the rows of a step that have some.

    A step sends the options of these rows, and of the tokens seen those that became known.

    Args:
        vocab_size: V.
        last_tokens: int64 ``[R]``, the last token of each row of the scheduler. One that the host
            does not know yet is counted from here.

    Attributes:
        most_rows: rows that one call of :meth:`change` takes.
        upload: brings small arrays to the device; for one call a step beside :meth:`change`.
    """

    def __init__(self, vocab_size: int, last_tokens: Tensor) -> None:
        rows, device = len(last_tokens), last_tokens.device
        self.most_rows = min(rows, _MOST_ROWS)
        self._vocab_size = vocab_size
        self._last_tokens = last_tokens
        # Copies of two steps may be in flight; with one buffer more none is waited for.
        turns = -(-rows // max(self.most_rows, 1))
        bitmasks = self.most_rows * -(-vocab_size // 32) * 4
        self.upload = uploads_to(device, 2 * (turns + 1) + 1, 2 * bitmasks)
        self._seen = SeenTokens(rows, vocab_size, device)
        self._changed = torch.empty((self.most_rows, vocab_size), device=device)

    @staticmethod
    def nbytes(rows: int, vocab_size: int) -> int:
        """Device memory that is held for good."""
        return vocab_size * (2 * rows + 4 * min(rows, _MOST_ROWS))

    def change(self, logits: Tensor, inputs: StepInputs, places: Sequence[int]) -> Tensor:
        """The changed logits of some rows; the logits stay as they are.

        Args:
            logits: ``[Y, V]``.
            inputs: the step.
            places: of the rows, at most ``most_rows``. The states of those with a grammar know
                all tokens.

        Returns:
            fp32 ``[n, V]``, to be used before the next call.
        """
        rows = [inputs.rows[place] for place in places]
        states = [inputs.states[place] for place in places]
        counts = [inputs.counts[place] for place in places]
        counted = [
            (row, s.counts) for row, s in zip(rows, states, strict=True) if s.counts is not None
        ]
        seen_rows, seen = [row for row, _ in counted], [count for _, count in counted]
        new = self._seen.changes(seen_rows, seen)
        records = np.zeros(len(rows), ROW_OPTIONS)
        records["place"], records["row"] = places, rows
        penalties = np.array([state.penalties for state in states], np.float32)
        records["repetition"], records["presence"], records["frequency"] = penalties.T
        records["pending"] = np.array(counts) - [state.generated for state in states]
        grammars, bitmasks = bitmasks_of([state.grammar for state in states], self._vocab_size)
        records["bitmask"] = -1
        records["bitmask"][grammars] = np.arange(len(grammars))
        if not grammars:  # the kernel looks at one
            bitmasks = np.full((1, bitmasks.shape[1]), -1, np.int32)
        pairs = zip(states, counts, strict=True)
        bias = joined_bias([state.bias_of(count) for state, count in pairs])
        arrays = self.upload(
            {
                "records": records.view(np.int32).reshape(len(rows), words(ROW_OPTIONS)),
                "bitmasks": bitmasks,
                "seen_rows": new[0],
                "seen_tokens": new[1],
                "seen_states": new[2],
                "bias_rows": bias[0],
                "bias_tokens": bias[1],
                "bias_amounts": bias[2],
            }
        )
        store_seen(
            self._seen.table, arrays["seen_rows"], arrays["seen_tokens"], arrays["seen_states"]
        )
        self._seen.written(seen_rows, seen)
        change_rows(
            logits,
            arrays["records"],
            self._seen.table,
            self._last_tokens,
            arrays["bitmasks"],
            (arrays["bias_rows"], arrays["bias_tokens"], arrays["bias_amounts"]),
            self._changed,
        )
        return self._changed[: len(rows)]
