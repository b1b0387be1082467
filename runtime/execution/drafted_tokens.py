"""The tokens of a step with drafts on their way to the host."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from dsa_compile.runtime.execution.runner import LaunchedTokens, ReadTokens, StepTokens
from dsa_compile.runtime.sampling.sampler import BAD_LOGITS
from dsa_compile.runtime.scheduling.step import Failure

# One that is read, one on the device, one that is filled, as steps in flight are two.
_SLOTS = 3


@dataclass(frozen=True)
class _Slot:
    memory: Tensor
    event: torch.cuda.Event | None
    views: dict[torch.Size, Tensor] = field(default_factory=dict)

    def view(self, shape: torch.Size) -> Tensor:
        """The start of the memory, made once for each shape."""
        if shape not in self.views:
            self.views[shape] = self.memory[: shape.numel()].view(shape)
        return self.views[shape]


class TokenSlots:
    """Host memory for the outcomes of steps, in turn."""

    def __init__(self, rows: int, width: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self._slots = [
            _Slot(
                torch.zeros(rows * (1 + width), dtype=torch.int64, pin_memory=pinned),
                torch.cuda.Event() if pinned else None,
            )
            for _ in range(_SLOTS)
        ]
        self._next = 0

    def send(self, outcome: Tensor, places: Sequence[int] | None) -> LaunchedTokens:
        """Start the copy of an outcome; the host does not wait.

        Args:
            outcome: int64 ``[Y, 1 + W]``, how many tokens count of each request, and its tokens.
            places: of the requests that yield, or None for all.
        """
        slot = self._slots[self._next]
        event = slot.event
        if event is not None:
            event.synchronize()  # at once, but for a step that was given up
        here = slot.view(outcome.shape)
        here.copy_(outcome, non_blocking=True)
        if event is not None:
            event.record()
        self._next = (self._next + 1) % _SLOTS
        return ReadTokens(partial(_read, here, event, places))


def _read(
    outcome: Tensor, event: torch.cuda.Event | None, places: Sequence[int] | None
) -> StepTokens:
    """Wait for an outcome; a RuntimeError is what the device reports of its step or before."""
    if event is not None:
        event.synchronize()
    rows = outcome.tolist()
    if places is not None:
        rows = [rows[place] for place in places]
    return StepTokens(
        [Failure(BAD_LOGITS) if tokens[0] < 0 else tokens[:count] for count, *tokens in rows]
    )
