"""Server-sent events, several answers at once, and clients that leave."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from dsa_compile.server.choice import Choice, Piece
from dsa_compile.server.errors import ApiError

DONE = b"data: [DONE]\n\n"
T = TypeVar("T")
encode_json = msgspec.json.Encoder().encode


class JsonResponse(Response):
    """An answer of JSON."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """The body."""
        return encode_json(content)


def error_response(
    scope: Scope, error: ApiError, headers: Mapping[str, str] | None = None
) -> Response:
    """The answer that is an error, in the shape that the request's route has."""
    headers = {**error.headers(), **(headers or {})}
    return JsonResponse(error.body(scope["path"]), error.status, headers)


def event(content: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + encode_json(content) + b"\n\n"


def typed_event(content: Mapping[str, Any]) -> bytes:
    """One that tells its ``type`` beside the data, too."""
    return b"event: %b\n%b" % (content["type"].encode(), event(content))


class EventStream(Response):
    """A stream of server-sent events; stops as soon as the client leaves.

    Args:
        events: of the stream; an :class:`ApiError` becomes its last event but one.
        close: called once when the stream is over, however it ends.
        headers: of the response, besides its own.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        close: Callable[[], None],
        headers: Mapping[str, str] | None = None,
    ) -> None:
        own = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(headers={**own, **(headers or {})})
        del self.headers["content-length"]
        self._events = events
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream."""
        try:
            # An answer that has begun cannot become another: its client is gone, and that is all.
            with contextlib.suppress(ClientGoneError):
                await _unless_gone(receive, self._send(send))
        finally:
            self._close()

    async def _send(self, send: Send) -> None:
        start = {"status": self.status_code, "headers": self.raw_headers}
        await send({"type": "http.response.start", **start})
        try:
            async with contextlib.aclosing(self._events) as events:
                async for data in events:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
        except ApiError as error:
            data = event(error.body()) + DONE
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


class ClientGoneError(Exception):
    """The client closed the connection before the answer was complete."""


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Run ``work``, unless the client leaves first.

    Raises:
        ClientGoneError: the client left; ``work`` is cancelled.
    """
    return await _unless_gone(request.receive, work)


async def _unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGoneError
        return working.result()
    finally:
        for task in (working, watching):
            if not task.done():
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def merged(choices: Sequence[Choice]) -> AsyncGenerator[tuple[Choice, Piece], None]:
    """Pieces of several answers as they come; of one, without a task of its own."""
    if len(choices) == 1:
        async for piece in choices[0].pieces():
            yield choices[0], piece
        return
    # One place: a client that reads slowly leaves the pieces where they are merged.
    queue: asyncio.Queue[tuple[Choice, Piece] | Exception | None] = asyncio.Queue(1)

    async def forward(choice: Choice) -> None:
        try:
            async for piece in choice.pieces():
                await queue.put((choice, piece))
            await queue.put(None)
        except Exception as error:
            await queue.put(error)

    tasks = [asyncio.create_task(forward(choice)) for choice in choices]
    left = len(tasks)
    try:
        while left:
            found = await queue.get()
            if isinstance(found, Exception):
                raise found
            if found is None:
                left -= 1
            else:
                yield found
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
