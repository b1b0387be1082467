"""Admission: how many requests and tokens may be unfinished, and none while the server drains."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from dsa_compile.runtime.scheduling.limits import SchedulerConfig
from dsa_compile.server.errors import ApiError


class Admission:
    """Counts engine requests and the tokens of their prompts from admission to their end.

    Args:
        max_queued: requests that may be unfinished beyond those a step of the engine holds.
        max_queued_tokens: of their prompts, beyond those that the caches hold.
    """

    def __init__(self, max_queued: int, max_queued_tokens: int) -> None:
        self.draining = False
        self.admitted = 0
        self._tokens = 0
        self._max_queued = max_queued
        self._max_queued_tokens = max_queued_tokens
        self._empty = asyncio.Event()
        self._empty.set()

    @contextmanager
    def admit(self, count: int, tokens: int, limits: SchedulerConfig) -> Iterator[None]:
        """Hold places for a request's choices.

        Args:
            count: engine requests.
            tokens: of all their prompts.
            limits: of the engine.

        Raises:
            ApiError: the queue is full (429) or the server drains (503).
        """
        if self.draining:
            raise ApiError(503, "the server is shutting down", code="draining", retry_after=10)
        most = limits.max_num_seqs + self._max_queued
        most_tokens = limits.capacity + self._max_queued_tokens
        if self.admitted and (self.admitted + count > most or self._tokens + tokens > most_tokens):
            present = f"{self.admitted} requests with {self._tokens:,} prompt tokens"
            message = f"{present} are waiting or running; try again later"
            raise ApiError(429, message, code="queue_full", retry_after=1)
        self.admitted += count
        self._tokens += tokens
        self._empty.clear()
        try:
            yield
        finally:
            self.admitted -= count
            self._tokens -= tokens
            if not self.admitted:
                self._empty.set()

    async def drained(self) -> None:
        """Wait until every admitted request has ended."""
        await self._empty.wait()
