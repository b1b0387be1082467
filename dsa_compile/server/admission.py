"""Admission: how many requests may be unfinished, and none while the server drains."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from dsa_compile.server.errors import ApiError


class Admission:
    """Counts engine requests from admission to their end.

    Args:
        max_queued: requests that may be unfinished beyond those a step of the engine holds.
    """

    def __init__(self, max_queued: int) -> None:
        self.draining = False
        self.admitted = 0
        self._max_queued = max_queued
        self._empty = asyncio.Event()
        self._empty.set()

    @contextmanager
    def admit(self, count: int, max_running: int) -> Iterator[None]:
        """Hold places for a request's choices.

        Args:
            count: engine requests.
            max_running: requests of one engine step.

        Raises:
            ApiError: the queue is full (429) or the server drains (503).
        """
        if self.draining:
            raise ApiError(503, "the server is shutting down", code="draining", retry_after=10)
        if self.admitted and self.admitted + count > max_running + self._max_queued:
            message = f"{self.admitted} requests are waiting or running; try again later"
            raise ApiError(429, message, code="queue_full", retry_after=1)
        self.admitted += count
        self._empty.clear()
        try:
            yield
        finally:
            self.admitted -= count
            if not self.admitted:
                self._empty.set()

    async def drained(self) -> None:
        """Wait until every admitted request has ended."""
        await self._empty.wait()
