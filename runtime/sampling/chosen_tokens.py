"""Host buffers in which a step's tokens and log-probabilities arrive from the device."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from dsa_compile.kernels.cuda.sample_tokens import OPTIONS
from dsa_compile.kernels.sampling_layout import ROW_LOGPROBS, words
from dsa_compile.runtime.execution.runner import StepTokens
from dsa_compile.runtime.sampling.row_logprobs import read_logprobs
from dsa_compile.runtime.sampling.sampler import BAD_LOGITS, NOTHING_LEFT
from dsa_compile.runtime.scheduling.step import Failure


class Slot:
    """Pinned memory that the kernels of one step read and write.

    The first R options and tokens are of all rows, from the model's own logits; those behind them
    are of the rows whose logits were changed.

    Args:
        rows: R.
        on_device: whether a GPU uses it.
    """

    def __init__(self, rows: int, on_device: bool) -> None:
        size = 2 * rows * OPTIONS.itemsize
        self.options = torch.zeros(size, dtype=torch.uint8, pin_memory=on_device)
        self.records = self.options.numpy().view(OPTIONS)
        self.tokens = torch.zeros(2 * rows, dtype=torch.int64, pin_memory=on_device)
        self.on_host: NDArray[np.int64] = self.tokens.numpy()
        shape = (rows, words(ROW_LOGPROBS))
        self.logprobs = torch.zeros(shape, dtype=torch.int32, pin_memory=on_device)
        self.done = torch.cuda.Event() if on_device else None


@dataclass(frozen=True, slots=True, eq=False)
class Chosen:
    """Tokens that the device is choosing.

    Args:
        slot: takes them.
        count: requests that yield one.
        changed: places of those whose logits were changed.
        described: places of those that want log-probabilities.
        alternatives: how many of the likeliest tokens each of these wants.
    """

    slot: Slot
    count: int
    changed: Sequence[int]
    described: Sequence[int]
    alternatives: Sequence[int]

    def read(self) -> StepTokens:
        """The tokens; waits for the step that makes them."""
        if self.slot.done is not None:
            self.slot.done.synchronize()
        all_tokens = self.slot.on_host
        tokens: list[int] = all_tokens[: self.count].tolist()
        if not self.changed and not self.described and min(tokens, default=0) >= 0:
            return StepTokens([[token] for token in tokens])
        results: list[list[int] | Failure] = [
            Failure(BAD_LOGITS) if token < 0 else [token] for token in tokens
        ]
        start = len(all_tokens) // 2
        behind = all_tokens[start : start + len(self.changed)].tolist()
        for place, token in zip(self.changed, behind, strict=True):
            if tokens[place] >= 0:
                results[place] = Failure(NOTHING_LEFT) if token < 0 else [token]
        records = self.slot.logprobs.numpy()[: len(self.described)]
        chosen = [
            0 if isinstance(result := results[place], Failure) else result[0]
            for place in self.described
        ]
        entries = read_logprobs(records, chosen, self.alternatives)
        logprobs = {
            place: [entry]
            for place, entry in zip(self.described, entries, strict=True)
            if not isinstance(results[place], Failure)
        }
        return StepTokens(results, logprobs)
