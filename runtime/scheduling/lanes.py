"""One schedule over several lanes: groups of requests with cache blocks of their own.

A request stays in the lane that it was added to: the one that has the longest prefix of it in its
cache, unless that lane has noticeably more to do than another, or else the least busy one. Each
lane is a :class:`~dsa_compile.runtime.scheduling.scheduler.Scheduler`; a step is one step of each,
their entries in the order of lanes. A lane may have none.
"""

from collections import deque
from collections.abc import Callable, Collection, Sequence
from itertools import islice
from typing import TypeAlias

from dsa_compile.errors import RequestError
from dsa_compile.runtime.pages.table import BlockTable
from dsa_compile.runtime.scheduling.limits import SchedulerConfig
from dsa_compile.runtime.scheduling.request import Request
from dsa_compile.runtime.scheduling.scheduler import Scheduler
from dsa_compile.runtime.scheduling.stats import SchedulerStats
from dsa_compile.runtime.scheduling.step import Failure, ScheduledStep

_COUNTS = (
    "running", "waiting", "free_blocks", "cached_blocks", "owned_blocks", "preemptions",
    "prefix_hit_tokens",
)  # fmt: skip


class LaneScheduler:
    """Has the methods of a :class:`~dsa_compile.runtime.scheduling.scheduler.Scheduler`.

    Lost pages are reported to the lane that lost them.

    Args:
        config: limits of one lane.
        lanes: how many.

    Attributes:
        config: as given.
        lanes: the scheduler of each.
    """

    def __init__(self, config: SchedulerConfig, lanes: int) -> None:
        self.config = config
        self._table = table = BlockTable.of(config, lanes)
        self.lanes = tuple(Scheduler(config, table, lane) for lane in range(lanes))
        # Steps with the steps of lanes that they are made of, in the order of lanes.
        self._in_flight: deque[tuple[ScheduledStep, list[ScheduledStep]]] = deque()

    def check_admissible(self, request_id: str, prompt_len: int, max_tokens: int) -> None:
        """Check that a request of this name and size can be added.

        Raises:
            RequestError: the id is taken, or the request can never fit; names the limit.
        """
        if any(request_id in lane.requests for lane in self.lanes):
            raise RequestError(f"request {request_id!r} is already in progress; choose another id")
        self.config.check_fits(request_id, prompt_len, max_tokens)

    def add(self, request: Request) -> None:
        """Queue a new request in one of the lanes.

        Raises:
            RequestError: as :meth:`check_admissible`.
        """
        self.check_admissible(request.request_id, request.prompt_len, request.max_tokens)
        self._lane_for(request).add(request)

    def _lane_for(self, request: Request) -> Scheduler:
        least = min(len(lane.requests) for lane in self.lanes)
        # A cached prefix is worth a place behind a few more requests, and no idle lane.
        most = least + 1 + least // 4
        near = [lane for lane in self.lanes if len(lane.requests) <= most]
        return max(near, key=lambda lane: (lane.cached_prefix(request), -len(lane.requests)))

    def abort(self, request_id: str) -> Request | None:
        """End a request now; None if there is no such unfinished request."""
        found = (lane.abort(request_id) for lane in self.lanes)
        return next((request for request in found if request is not None), None)

    @property
    def num_in_flight(self) -> int:
        """Steps scheduled and neither committed nor given up."""
        return len(self._in_flight)

    def has_unfinished(self) -> bool:
        """Whether any request waits or runs."""
        return any(lane.has_unfinished() for lane in self.lanes)

    def fail(self, request: Request, reason: str) -> None:
        """End an unfinished request with an error."""
        own = next(lane for lane in self.lanes if request.request_id in lane.requests)
        own.fail(request, reason)

    def schedule(
        self, prompt_tokens: int | None = None, only: Collection[Request] | None = None
    ) -> ScheduledStep:
        """Choose the next step of every lane; it is in flight from now on unless it has no entries.

        Args:
            prompt_tokens: compute at most so many of the prompts of a lane.
            only: compute tokens of these requests only, and admit no other.
        """
        steps = [lane.schedule(prompt_tokens, only) for lane in self.lanes]
        entries = [entry for step in steps for entry in step.entries]
        whole = ScheduledStep(entries, self._table)
        if entries:
            self._in_flight.append((whole, steps))
        return whole

    def when_copied(self, call: Callable[[], None]) -> None:
        """Have ``call`` called, perhaps in another thread, once a copy of pages has ended."""
        for lane in self.lanes:
            lane.when_copied(call)

    def commit(
        self, step: ScheduledStep, results: Sequence[Sequence[int] | Failure]
    ) -> list[Request]:
        """Take a finished step's results; steps are committed in the order they were scheduled.

        Returns:
            The requests that got tokens or failed, in the step's order.
        """
        oldest, steps = self._in_flight[0]
        assert step is oldest, "steps are committed in the order they were scheduled"
        self._in_flight.popleft()
        changed: list[Request] = []
        remaining = iter(results)
        for lane, own in zip(self.lanes, steps, strict=True):
            if own.entries:
                count = sum(entry.max_new > 0 for entry in own.entries)
                changed += lane.commit(own, list(islice(remaining, count)))
        assert next(remaining, None) is None, "results of entries that yield nothing"
        return changed

    def discard(self) -> None:
        """Give up the newest step in flight: its tokens were not computed and will be again."""
        _, steps = self._in_flight.pop()
        for lane, own in zip(self.lanes, steps, strict=True):
            if own.entries:
                lane.discard()

    def stats(self) -> SchedulerStats:
        """The present counts, of all lanes together and of each."""
        each = tuple(lane.stats() for lane in self.lanes)
        sums = {name: sum(getattr(stats, name) for stats in each) for name in _COUNTS}
        return SchedulerStats(**sums, lanes=each)

    def check(self) -> None:
        """Assert every invariant of every lane; for tests."""
        for lane in self.lanes:
            lane.check()


AnyScheduler: TypeAlias = Scheduler | LaneScheduler
"""One for requests that share cache blocks, or one over several lanes."""
