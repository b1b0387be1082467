"""Continuous batching: which requests compute which tokens in the next step.

One step mixes decoding requests (one token each and drafts, first) with chunks of prompts under one
token budget. Requests rank by priority, then arrival; when blocks run out the lowest rank is
preempted and later recomputes what the prefix cache lost. The highest rank is never preempted for
another, so some request always finishes. A waiting request never overtakes one of higher rank.

``schedule`` never reads a generated token, and everything a step in flight may touch is kept until
its ``commit``: a caller may schedule step n+1 before it commits step n. How many tokens step n
yields need not be known for that: blocks and positions are those of the most it may yield, and what
it did not yield is taken off again by its commit.
"""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Collection, Sequence
from operator import attrgetter

from dsa_compile.errors import RequestError
from dsa_compile.runtime.pages.pages import Pages
from dsa_compile.runtime.pages.table import BlockTable
from dsa_compile.runtime.requests.outputs import FinishReason
from dsa_compile.runtime.scheduling.limits import SchedulerConfig
from dsa_compile.runtime.scheduling.prompt_lookup import look_up_drafts
from dsa_compile.runtime.scheduling.request import Request, Status
from dsa_compile.runtime.scheduling.stats import SchedulerStats
from dsa_compile.runtime.scheduling.step import (
    Failure,
    Phase,
    ScheduledEntry,
    ScheduledStep,
)

_RANK = attrgetter("rank")


class Scheduler:
    """Requests and the order they run in.

    Use: ``add``, then ``step = schedule()``, run it, ``commit(step, results)``, and so on until
    ``has_unfinished()`` is false.

    Args are those of :class:`~dsa_compile.runtime.pages.pages.Pages`.

    Attributes:
        requests: those that wait or run, by name.
        pages: of those that run.
    """

    def __init__(
        self, config: SchedulerConfig, table: BlockTable | None = None, lane: int = 0
    ) -> None:
        self.config = config
        self.pages = Pages(config, table, lane)
        self._in_flight: deque[ScheduledStep] = deque()
        self.requests: dict[str, Request] = {}
        self._running: list[Request] = []  # both sorted by rank
        self._waiting: list[Request] = []
        self._decode_tokens = config.decode_tokens
        self._looks_up = config.looks_up_drafts
        self._draft_max_rows = config.draft_max_rows or config.max_num_seqs
        self._arrivals = 0
        self._preemptions = 0

    def check_admissible(self, request_id: str, prompt_len: int, max_tokens: int) -> None:
        """Check that a request of this name and size can be added.

        Raises:
            RequestError: the id is taken, or the request can never fit; names the limit.
        """
        if request_id in self.requests:
            raise RequestError(f"request {request_id!r} is already in progress; choose another id")
        self.config.check_fits(request_id, prompt_len, max_tokens)

    def add(self, request: Request) -> None:
        """Queue a new request.

        Raises:
            RequestError: as :meth:`check_admissible`.
        """
        self.check_admissible(request.request_id, request.prompt_len, request.max_tokens)
        request.reserve_output()
        request.rank = (request.priority, self._arrivals)
        self._arrivals += 1
        self.requests[request.request_id] = request
        insort(self._waiting, request, key=_RANK)

    def abort(self, request_id: str) -> Request | None:
        """End a request now; None if there is no such unfinished request.

        If a step in flight computes it, that step's result is dropped and its blocks return to the
        pool when that step is committed.
        """
        request = self.requests.get(request_id)
        if request is not None:
            self._finish(request, "abort")
        return request

    @property
    def num_in_flight(self) -> int:
        """Steps scheduled and neither committed nor given up."""
        return len(self._in_flight)

    def has_unfinished(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self.requests)

    def cached_prefix(self, request: Request) -> int:
        """Tokens of a request, not added yet, that it would find in the cache now."""
        return self.pages.cached_prefix(request)

    def fail(self, request: Request, reason: str) -> None:
        """End an unfinished request with an error; the rest is as in :meth:`abort`."""
        request.error = f"request {request.request_id!r}: {reason}"
        self._finish(request, "error")

    def schedule(
        self, prompt_tokens: int | None = None, only: Collection[Request] | None = None
    ) -> ScheduledStep:
        """Choose the next step; it is in flight from now on unless it has no entries.

        Entries are empty only if no request is unfinished, if all wait for a step in flight or for
        pages that are copied, or if none of ``only`` is running.

        Args:
            prompt_tokens: compute at most so many of prompts; a deterministic step takes a chunk
                whole all the same.
            only: compute tokens of these requests only, and admit no other.
        """
        if self.pages.tiers:
            self.pages.settle()
        step = ScheduledStep([], self.pages.table)
        entries = step.entries
        running = self._running.copy() if only is None else [r for r in self._running if r in only]
        if self.config.deterministic:
            self._choose_alike(entries, running, admit=only is None)
        else:
            self._choose_mixed(entries, running, prompt_tokens, admit=only is None)
        for request, start, count, max_new, _ in entries:
            request.num_scheduled = start + count
            request.num_pending += max_new
        if entries:
            self._in_flight.append(step)
            self.pages.begin()
        stuck = not (entries or self._in_flight or self.pages.moving or only is not None)
        assert not (stuck and self.requests), "no request can make progress"
        return step

    def when_copied(self, call: Callable[[], None]) -> None:
        """Have ``call`` called, perhaps in another thread, once a copy of pages has ended."""
        for tier in self.pages.tiers:
            tier.when_ended(call)

    def commit(
        self, step: ScheduledStep, results: Sequence[Sequence[int] | Failure]
    ) -> list[Request]:
        """Take a finished step's results; steps are committed in the order they were scheduled.

        Args:
            step: the oldest step in flight.
            results: for each entry that yields, in order, its 1 to ``max_new`` tokens or why there
                are none. What came of requests that ended while the step ran is ignored, as are
                tokens behind one that ends its request.

        Returns:
            The requests that got tokens or failed, in the step's order; those with a
            ``finish_reason`` are done and have given up their blocks.
        """
        assert step is self._in_flight[0], "steps are committed in the order they were scheduled"
        self._in_flight.popleft()
        self.pages.commit()
        size, finished = self.config.block_size, Status.FINISHED
        changed = []
        remaining = iter(results)
        for request, _, count, max_new, _ in step.entries:
            result = next(remaining) if max_new else ()
            if request.status is finished:
                continue
            if isinstance(result, Failure):
                # Whatever spoiled its logits may sit in its cache rows.
                self.pages.forget(request)
                self.fail(request, result.reason)
                changed.append(request)
                continue
            reason = request.commit(count, max_new, result)
            if request.num_computed >= (request.num_registered + 1) * size:
                self.pages.register_full_blocks(request)
            if reason is not None:
                self._finish(request, reason)
            if max_new:
                changed.append(request)
        assert next(remaining, None) is None, "results of entries that yield nothing"
        return changed

    def discard(self) -> None:
        """Give up the newest step in flight: its tokens were not computed and will be again."""
        for request, _, count, max_new, _ in self._in_flight.pop().entries:
            request.num_scheduled -= count
            request.num_pending -= max_new
        self.pages.discard()

    def lose_page(self, block: int) -> None:
        """A page of ``block`` was lost: prefixes through it are recomputed, also by running
        requests. No step may be in flight.
        """
        assert not self._in_flight, "a step in flight may use the lost page"
        for request in [r for r in self._running if block in r.blocks]:
            self._preempt(request)
        self.pages.lose(block)

    def stats(self) -> SchedulerStats:
        """The present counts."""
        blocks = self.pages.blocks
        return SchedulerStats(
            running=len(self._running),
            waiting=len(self._waiting),
            free_blocks=blocks.num_free,
            cached_blocks=blocks.num_blocks - blocks.num_free - blocks.num_owned,
            owned_blocks=blocks.num_owned,
            preemptions=self._preemptions,
            prefix_hit_tokens=self.pages.prefix_hit_tokens,
        )

    def check(self) -> None:
        """Assert every invariant of requests, blocks and tree; linear, for tests."""
        self.pages.check(self._running)
        for requests, status in ((self._running, Status.RUNNING), (self._waiting, Status.WAITING)):
            assert requests == sorted(requests, key=_RANK), f"{status}: out of order"
            assert all(request.status is status for request in requests), f"{status}: another's"
        listed = {request.request_id for request in self._running + self._waiting}
        assert listed == self.requests.keys(), "a request is lost or listed twice"
        holding = {request for request in self._waiting if request.blocks}
        assert holding == self.pages.arriving.keys(), "a waiting request has blocks"

    def _choose_mixed(
        self,
        entries: list[ScheduledEntry],
        candidates: list[Request],
        prompt_tokens: int | None,
        *,
        admit: bool,
    ) -> None:
        """Decoding requests, then chunks of prompts, up to the budget."""
        budget = self.config.max_num_batched_tokens
        preemptions = self._preemptions
        prefills: list[Request] = []
        running, decode, drafting = Status.RUNNING, Phase.DECODE, self._decode_tokens > 1
        grow, make_room = self.pages.grow, self._make_room
        for request in candidates:
            if request.status is not running:  # preempted for one before it
                continue
            count = request.num_to_compute
            if count > 1:
                prefills.append(request)
            elif count == 1:
                if drafting:
                    count = min(self._with_drafts(request), budget)
                if count := grow(request, count, make_room):
                    start = request.num_scheduled
                    entries.append(ScheduledEntry(request, start, count, count, decode))
                    budget -= count
                    if budget == 0:
                        break
        if prompt_tokens is not None:
            budget = min(budget, prompt_tokens)
        for request in prefills:
            if budget > 0 and request.status is Status.RUNNING:
                budget -= _take_chunk(request, budget, entries)
        # What was just preempted must not come straight back for the blocks it gave up.
        if admit and self._preemptions == preemptions:
            while budget > 0 and (admitted := self._admitted()) is not None:
                budget -= _take_chunk(admitted, budget, entries)

    def _choose_alike(
        self, entries: list[ScheduledEntry], candidates: list[Request], *, admit: bool
    ) -> None:
        """One prompt's next chunk between fixed boundaries, or decoding requests alone.

        Prompts come first. A token that was once generated is computed in a step of its own kind
        again when its request was preempted, for its cache rows to be the same.
        """
        prompts = (r for r in candidates if r.num_scheduled < r.prompt_len)
        request = next(prompts, None)
        if admit and request is None:
            request = self._admitted()
        if request is not None:
            chunk, start = self.config.chunk, request.num_scheduled
            end = min(start - start % chunk + chunk, request.prompt_len)
            _take_chunk(request, end - start, entries)
            return
        budget = self.config.max_num_batched_tokens
        for request in candidates:
            if request.status is not Status.RUNNING or request.num_to_compute == 0:
                continue
            last = request.num_to_compute == 1
            count = min(self._with_drafts(request), budget) if last else 1
            if count := self.pages.grow(request, count, self._make_room):
                start, max_new = request.num_scheduled, count if last else 0
                entries.append(ScheduledEntry(request, start, count, max_new, Phase.DECODE))
                budget -= count
                if budget == 0:
                    break

    def _with_drafts(self, request: Request) -> int:
        """Tokens to compute of a request whose last token is next: that one and drafts."""
        start = request.num_scheduled
        if start < request.prompt_len or len(self._running) > self._draft_max_rows:
            return 1  # nothing was drafted yet, or rows are worth more to other requests
        count = min(self._decode_tokens, request.num_computable - start)
        return 1 + look_up_drafts(request, count - 1) if self._looks_up else count

    def _admitted(self) -> Request | None:
        """The first waiting request that is ready, if any, moved to the running ones.

        Those that hold blocks already, since their pages are on their way, neither keep others
        waiting nor wait for those that find no room.
        """
        full = False
        for place, request in enumerate(self._waiting):
            if full and not request.blocks:
                continue
            if self.pages.ready(request):
                del self._waiting[place]
                request.status = Status.RUNNING
                insort(self._running, request, key=_RANK)
                return request
            full = full or not request.blocks
            if full and not self.pages.arriving:
                break
        return None

    def _make_room(self, request: Request) -> bool:
        """Preempt the lowest rank below ``request`` that no step in flight computes, if any."""
        for victim in reversed(self._running):
            if victim is request:
                return False
            if not victim.in_flight:
                self._preempt(victim)
                return True
        raise AssertionError(f"request {request.request_id!r} is not running")

    def _preempt(self, request: Request) -> None:
        """Send a running request back to its place in the queue, to recompute its tokens."""
        assert not request.in_flight, "a step in flight uses its blocks"
        _remove(self._running, request)
        self.pages.leave(request)
        request.status = Status.WAITING
        request.num_computed = request.num_scheduled = 0
        request.num_preemptions += 1
        self._preemptions += 1
        insort(self._waiting, request, key=_RANK)

    def _finish(self, request: Request, reason: FinishReason) -> None:
        _remove(self._running if request.status is Status.RUNNING else self._waiting, request)
        self.pages.leave(request)
        request.status = Status.FINISHED
        request.finish_reason = reason
        del self.requests[request.request_id]


def _remove(requests: list[Request], request: Request) -> None:
    """Take a request out of a list in the order of ranks, which it is in."""
    place = bisect_left(requests, request.rank, key=_RANK)
    assert requests[place] is request, "requests are sorted by rank"
    del requests[place]


def _take_chunk(request: Request, budget: int, entries: list[ScheduledEntry]) -> int:
    """Schedule what the budget allows of a request that holds blocks for it; tokens taken."""
    todo = request.num_to_compute
    count = min(todo, budget)
    phase = Phase.DECODE if count == 1 else Phase.PROMPT
    entries.append(ScheduledEntry(request, request.num_scheduled, count, int(count == todo), phase))
    return count
