"""A step that failed, run again in parts, until the request that is to blame is alone.

The step is halved: decoding requests apart from prompts first, then either kind in two. Everything
that succeeds makes its progress at each level, and a request that fails even alone is the one to
blame.

A step that found no memory may yet fit where it computes less, so the chunk of a lone prompt is
halved too, down to a single token: if that fails, nothing that the engine could do makes room for
it. Scheduling plans for the largest step that was tried when the model was loaded; a step may still
find no memory where something else on the device took it, or where ``num_blocks`` was given by
hand.

So that not every step fails before it succeeds, chunks of prompts stay small afterwards, and are
doubled again while all goes well. Decoding requests are never held back for it: that would stop
those behind the first few. If they fail together they are taken apart each time.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from dsa_compile.runtime.scheduling.lanes import AnyScheduler
from dsa_compile.runtime.scheduling.request import Request, Status
from dsa_compile.runtime.scheduling.step import Phase, ScheduledEntry, ScheduledStep

# Steps of at least the limit that must fit before it is doubled. A failure costs the allocator's
# cached memory and a wait for the device, some milliseconds: little in so many steps of prompts.
_PATIENCE = 16


class _Part(NamedTuple):
    requests: frozenset[Request]
    prompt_tokens: int | None = None


class SmallerSteps:
    """Schedules steps, smaller ones after one failed.

    Args:
        scheduler: of the engine.

    Attributes:
        memory_failures: steps that found no memory so far.
        op_failures: steps that failed for another reason so far.
    """

    def __init__(self, scheduler: AnyScheduler) -> None:
        self._scheduler = scheduler
        self._whole_chunks = scheduler.config.deterministic
        self._parts: deque[_Part] = deque()
        self._of_part = False  # whether the newest step is one
        self._limit: int | None = None  # of the tokens of prompts
        self._fitted = 0
        self.memory_failures = 0
        self.op_failures = 0

    @property
    def pending(self) -> bool:
        """Whether parts are to be run, each with no other step in flight."""
        return bool(self._parts)

    def schedule(self) -> ScheduledStep:
        """The next step: a part's, or else one of all requests."""
        while self._parts:
            part = self._parts.popleft()
            step = self._scheduler.schedule(part.prompt_tokens, part.requests)
            if step.entries:  # else its requests have ended, or gave up their blocks
                self._of_part = True
                return step
        self._of_part = False
        return self._scheduler.schedule(self._limit)

    def fitted(self, step: ScheduledStep) -> None:
        """Note that the newest step found its memory."""
        if self._limit is None or self._of_part or step.num_tokens < self._limit:
            return
        self._fitted += 1
        if self._fitted == _PATIENCE:
            self._fitted = 0
            self._limit *= 2
            if self._limit >= self._scheduler.config.max_num_batched_tokens:
                self._limit = None

    def failed(self, step: ScheduledStep, *, alone: bool, of_memory: bool) -> Request | None:
        """Plan parts of a step that failed and is undone already.

        Args:
            step: that one.
            alone: no other step was in flight; else nobody is to blame before it was tried without.
            of_memory: it found no memory.

        Returns:
            The request to blame, or None if smaller parts are to be tried.
        """
        if of_memory:
            self.memory_failures += 1
        else:
            self.op_failures += 1
        entries = [e for e in step.entries if e.request.status is Status.RUNNING]
        if len(entries) > 1:
            self._parts.extendleft(map(_part, reversed(_halves(entries))))
        elif entries and (of_memory and self._can_be_cut(entries[0])):
            requests = frozenset((entries[0].request,))
            self._parts.appendleft(_Part(requests, entries[0].num_tokens // 2))
        elif entries:
            if alone:
                if of_memory:
                    self._limit = None  # the request explains what failed before
                return entries[0].request
            self._parts.appendleft(_part(entries))
        if of_memory and (prompts := _prompt_tokens(entries)):
            self._limit = prompts // 2
            self._fitted = 0
        return None

    def _can_be_cut(self, entry: ScheduledEntry) -> bool:
        return entry.phase is Phase.PROMPT and not self._whole_chunks


def _halves(entries: Sequence[ScheduledEntry]) -> list[Sequence[ScheduledEntry]]:
    """Decoding requests and prompts, or two halves of either."""
    prompts = [entry for entry in entries if entry.phase is Phase.PROMPT]
    decoding = [entry for entry in entries if entry.phase is Phase.DECODE]
    if prompts and decoding:
        return [decoding, prompts]
    middle = len(entries) // 2
    return [entries[:middle], entries[middle:]]


def _part(entries: Sequence[ScheduledEntry]) -> _Part:
    return _Part(frozenset(entry.request for entry in entries), _prompt_tokens(entries) or None)


def _prompt_tokens(entries: Sequence[ScheduledEntry]) -> int:
    return sum(entry.num_tokens for entry in entries if entry.phase is Phase.PROMPT)
