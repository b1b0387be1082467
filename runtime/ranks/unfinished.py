"""Steps that a rank's GPU has not finished yet, and how long they take."""

import time
from collections import deque

import torch


class UnfinishedSteps:
    """The steps that were launched on this process's GPU and may still run.

    Args:
        timeout: seconds that a step may take.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._steps: deque[tuple[torch.cuda.Event, float]] = deque()

    def launched(self) -> None:
        """Take note of what was just launched on the current stream."""
        event = torch.cuda.Event()
        event.record()
        self._steps.append((event, time.monotonic()))

    def any(self) -> bool:
        """Whether a step still runs.

        Raises:
            TimeoutError: for longer than it may.
            RuntimeError: the GPU failed.
        """
        while self._steps and self._steps[0][0].query():
            self._steps.popleft()
        if self._steps and time.monotonic() - self._steps[0][1] > self._timeout:
            raise TimeoutError(f"the step timed out after {self._timeout:g} s")
        return bool(self._steps)
