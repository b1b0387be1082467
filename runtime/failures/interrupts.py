"""Interrupts (Ctrl-C) put off while what must change together is changed."""

import threading

# What ``signal`` wraps: its own functions make enums of what they are given, 10 µs a call.
from _signal import SIGINT, getsignal, signal  # type: ignore[import-not-found]
from types import FrameType
from typing import Any


class Uninterrupted:
    """A context in which SIGINT waits: its handler runs, and raises, when the context ends.

    Python runs handlers in the main thread; elsewhere, and where nobody handles the signal, this
    does nothing. It may be entered once.
    """

    __slots__ = ("_frame", "_handler", "_pending")

    def __init__(self) -> None:
        self._handler: Any = None
        self._pending = False
        self._frame: FrameType | None = None

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        handler = getsignal(SIGINT)
        if callable(handler):
            self._handler = handler
            signal(SIGINT, self._note)

    def __exit__(self, *_: object) -> None:
        if self._handler is None:
            return
        signal(SIGINT, self._handler)
        if self._pending:
            self._handler(SIGINT, self._frame)

    def _note(self, _: int, frame: FrameType | None) -> None:
        self._pending, self._frame = True, frame
