"""A step that found no memory, run again in parts, until what does not fit is a single token.

Scheduling plans for the largest step that was tried when the model was loaded; a step may still
fail where something else on the device took memory, or where ``num_blocks`` was given by hand. The
step is halved: decoding requests apart from prompts first, then either kind in two, then the chunk
of a lone prompt. Everything that fits makes its progress at each level, and a request that fails
even alone with one token is the one to blame: nothing that the engine could do makes room for it.

If no request was to blame, steps stay small and are doubled again while all goes well, so that not
every step fails before it succeeds.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from dsa_compile.runtime.request import Request, Status
from dsa_compile.runtime.scheduler import Scheduler
from dsa_compile.runtime.step import ScheduledEntry, ScheduledStep

# Steps as large as the limit that must fit before it is doubled. A failure costs the allocator's
# cached memory and a wait for the device, some milliseconds: little in so many steps.
_PATIENCE = 64


class _Part(NamedTuple):
    requests: frozenset[Request]
    most_tokens: int


class SmallerSteps:
    """Schedules steps, smaller ones after one did not fit.

    Args:
        scheduler: of the engine.

    Attributes:
        failures: steps that did not fit so far.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._whole_chunks = scheduler.config.deterministic
        self._parts: deque[_Part] = deque()
        self._of_part = False  # whether the newest step is one
        self._limit: int | None = None
        self._limit_before: int | None = None  # the step that was taken apart
        self._fitted = 0
        self.failures = 0

    @property
    def pending(self) -> bool:
        """Whether parts are to be run, each with no other step in flight."""
        return bool(self._parts)

    def schedule(self) -> ScheduledStep:
        """The next step: a part's, or else one of all requests."""
        while self._parts:
            part = self._parts.popleft()
            step = self._scheduler.schedule(part.most_tokens, part.requests)
            if step.entries:  # else its requests have ended, or gave up their blocks
                self._of_part = True
                return step
        self._of_part = False
        return self._scheduler.schedule(self._limit)

    def fitted(self, step: ScheduledStep) -> None:
        """The newest step found its memory."""
        if self._limit is None or self._of_part or step.num_tokens < self._limit:
            return
        self._fitted += 1
        if self._fitted == _PATIENCE:
            self._fitted = 0
            self._limit *= 2
            if self._limit >= self._scheduler.config.max_batched_tokens:
                self._limit = None

    def failed(self, step: ScheduledStep, *, alone: bool) -> Request | None:
        """The newest step did not fit, and is undone already.

        Args:
            step: that one.
            alone: no other step was in flight; else nobody is to blame before it was tried without.

        Returns:
            The request to blame, or None if smaller parts are to be tried.
        """
        self.failures += 1
        if not self._of_part:
            self._limit_before = self._limit
        entries = [e for e in step.entries if e.request.status is Status.RUNNING]
        if not entries:
            return None
        if len(entries) > 1:
            self._parts.extendleft(map(_part, reversed(_halves(entries))))
        elif entries[0].num_tokens == 1 or self._whole_chunks:
            self._limit = self._limit_before
            if alone:
                return entries[0].request
            self._parts.appendleft(_part(entries))
            return None
        else:
            request, tokens = entries[0].request, entries[0].num_tokens
            self._parts.appendleft(_Part(frozenset((request,)), tokens // 2))
        self._fitted = 0
        self._limit = min(self._limit or step.num_tokens, max(1, step.num_tokens // 2))
        return None


def _halves(entries: Sequence[ScheduledEntry]) -> list[Sequence[ScheduledEntry]]:
    """Decoding requests and prompts, or two halves of either."""
    prompts = [entry for entry in entries if entry.num_tokens > 1]
    decoding = [entry for entry in entries if entry.num_tokens == 1]
    if prompts and decoding:
        return [decoding, prompts]
    middle = len(entries) // 2
    return [entries[:middle], entries[middle:]]


def _part(entries: Sequence[ScheduledEntry]) -> _Part:
    return _Part(frozenset(e.request for e in entries), sum(e.num_tokens for e in entries))
