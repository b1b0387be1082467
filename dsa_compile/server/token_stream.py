"""Tokens of one request on their way from the engine to whoever sends them on."""

import asyncio

from dsa_compile.server.errors import ApiError
from dsa_compile.server.protocol import Delta


class TokenStream:
    """Deltas of one request; those that are not taken yet are merged into one.

    So a client that reads slowly costs what its answer costs, and never the engine's time.

    Args:
        request_id: of the request.
    """

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self._pending: Delta | None = None
        self._error: ApiError | None = None
        self._changed = asyncio.Event()

    def put(self, delta: Delta) -> None:
        """Add what a step made."""
        pending = self._pending
        if pending is None:
            self._pending = delta
        else:
            pending.token_ids += delta.token_ids
            pending.logprobs += delta.logprobs
            pending.finish_reason = delta.finish_reason
            pending.error = delta.error
            pending.scheduled_at = delta.scheduled_at
        self._changed.set()

    def fail(self, error: ApiError) -> None:
        """End the stream with an error, after what is there already."""
        self._error = error
        self._changed.set()

    async def take(self) -> Delta:
        """Wait for new tokens or the end; one reader at a time.

        Raises:
            ApiError: the request failed.
        """
        await self._changed.wait()
        self._changed.clear()
        pending, self._pending = self._pending, None
        if self._error is not None:
            if pending is None:
                raise self._error
            self._changed.set()
        assert pending is not None
        return pending
