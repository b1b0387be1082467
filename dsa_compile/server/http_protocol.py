"""uvicorn's protocol over httptools, with limits on what comes before a request's body."""

import asyncio

MOST_HEAD = 256 * 1024
"""Bytes of a request line and headers."""


def bounded_protocol(seconds: float) -> type[asyncio.Protocol] | str:
    """Protocol for uvicorn's ``http``; without httptools h11's, which limits heads by itself.

    A longer head is answered with 431. A connection is closed if the head of its first request, or
    of another that has begun, does not come in time.

    Args:
        seconds: that a head may take to arrive.
    """
    try:
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
    except ImportError:
        return "h11"

    class BoundedProtocol(HttpToolsProtocol):
        _in_head = True
        _head_bytes = 0
        _late: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._await_head()

        def connection_lost(self, exc: Exception | None) -> None:
            self._head_is_there()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if not self._in_head:
                return
            self._head_bytes += len(data)
            if self._head_bytes > MOST_HEAD and not self.transport.is_closing():
                self.transport.write(
                    b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
                    b"connection: close\r\ncontent-length: 0\r\n\r\n"
                )
                self.transport.close()

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._await_head()

        def on_headers_complete(self) -> None:
            self._head_is_there()
            super().on_headers_complete()

        def _await_head(self) -> None:
            self._head_is_there()
            self._in_head, self._head_bytes = True, 0
            self._late = self.loop.call_later(seconds, self._close_late)

        def _head_is_there(self) -> None:
            self._in_head = False
            if self._late is not None:
                self._late.cancel()
                self._late = None

        def _close_late(self) -> None:
            if not self.transport.is_closing():
                self.transport.close()

    return BoundedProtocol
