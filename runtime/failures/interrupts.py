"""Interrupts (Ctrl-C and other signals) put off while what must change together is changed."""

import signal as names
import threading

# What ``signal`` wraps: its own functions make enums of what they are given, 10 µs a call.
from _signal import getsignal, signal  # type: ignore[import-not-found]
from types import FrameType
from typing import Any

# Those whose handlers programs let raise: Ctrl-C, the end of a time limit, a request to stop.
_SIGNALS = tuple(
    int(getattr(names, name))
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGALRM", "SIGVTALRM", "SIGUSR1", "SIGUSR2")
    if hasattr(names, name)
)


class Uninterrupted:
    """A context in which signals wait: their handlers run, and may raise, when the context ends.

    Python runs handlers in the main thread; elsewhere, and for signals that no Python function
    handles, this does nothing. It may be entered once.
    """

    __slots__ = ("_handlers", "_pending")

    def __init__(self) -> None:
        self._handlers: dict[int, Any] = {}
        self._pending: dict[int, FrameType | None] = {}

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        try:
            for number in _SIGNALS:
                handler = getsignal(number)
                if callable(handler):
                    self._handlers[number] = handler
                    signal(number, self._note)
        except BaseException:  # a handler's, of a signal that came before it was put off
            self._restore()
            raise

    def __exit__(self, *_: object) -> None:
        if self._handlers:
            try:
                self._restore()
            finally:
                self._deliver()

    def _restore(self) -> None:
        """Put the handlers back, all of them even if one runs meanwhile and raises."""
        raised: BaseException | None = None
        while True:
            try:
                for number, handler in self._handlers.items():
                    signal(number, handler)
                break
            except BaseException as error:
                raised = error
        if raised is not None:
            raise raised

    def _deliver(self) -> None:
        if not self._pending:
            return
        number = next(iter(self._pending))
        frame = self._pending.pop(number)
        try:
            self._handlers[number](number, frame)
        finally:
            self._deliver()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._pending[number] = frame
