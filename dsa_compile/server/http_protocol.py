"""uvicorn's protocol over httptools, with limits on what comes beside a request's body."""

import asyncio

MOST_HEAD = 256 * 1024
"""Bytes of a request line and headers; of what frames a body, in a row; and of its trailers."""
MOST_HEADERS = 1000


def bounded_protocol(seconds: float, unread: float | None = None) -> type[asyncio.Protocol] | str:
    """Protocol for uvicorn's ``http``; without httptools h11's, which has limits of its own.

    A head that is longer or has more headers is answered with 431, and so is a body with that much
    between two of its bytes or behind the last: the parser, unlike this class, keeps the beginning
    of a header however long it gets. Trailers are left out. A connection is closed if the head of
    its first request, or of another that has begun, does not come in time.

    A client that reads too little of what is sent to it is dropped, and its request ends.

    Args:
        seconds: that a head may take to arrive.
        unread: seconds that a full buffer of what is sent may take to empty; None for any time.
    """
    try:
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
    except ImportError:
        return "h11"

    class BoundedProtocol(HttpToolsProtocol):
        _in_head = True
        _too_many = False
        _aside = 0  # bytes since the last one of a body, or of a request
        _late: asyncio.TimerHandle | None = None
        _unread: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._await_head()

        def connection_lost(self, exc: Exception | None) -> None:
            self._head_is_there()
            self._is_read()
            super().connection_lost(exc)

        def pause_writing(self) -> None:
            super().pause_writing()
            if unread is not None:
                self._unread = self.loop.call_later(unread, self.transport.abort)

        def resume_writing(self) -> None:
            self._is_read()
            super().resume_writing()

        def _is_read(self) -> None:
            if self._unread is not None:
                self._unread.cancel()
                self._unread = None

        def data_received(self, data: bytes) -> None:
            self._aside += len(data)
            super().data_received(data)
            if self._aside > MOST_HEAD and not self.transport.is_closing():
                self._refuse()

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._await_head()

        def on_header(self, name: bytes, value: bytes) -> None:
            if self._in_head:
                super().on_header(name, value)
                self._too_many = len(self.headers) > MOST_HEADERS
                if self._too_many:
                    raise ValueError("too many headers")  # ends parsing, see send_400_response

        def send_400_response(self, msg: str) -> None:
            if self._too_many:
                self._refuse()
            else:
                super().send_400_response(msg)

        def on_headers_complete(self) -> None:
            self._head_is_there()
            super().on_headers_complete()

        def on_body(self, body: bytes) -> None:
            self._aside = 0
            super().on_body(body)

        def on_message_complete(self) -> None:
            self._aside = 0
            super().on_message_complete()

        def _refuse(self) -> None:
            if self._in_head or not self.cycle.response_started:
                self.transport.write(
                    b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
                    b"connection: close\r\ncontent-length: 0\r\n\r\n"
                )
            self.transport.close()

        def _await_head(self) -> None:
            self._head_is_there()
            self._in_head = True
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
