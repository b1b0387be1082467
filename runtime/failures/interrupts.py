"""Interrupts (Ctrl-C and other signals) put off while what must change together is changed."""

import signal as names
import sys
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


class SoleCall:
    """Lets one call of a function run at a time, whatever ended the calls before it.

    A lock would stay taken where an interrupt comes between the end of a call and its release. Held
    here is the call itself, and whether it still runs is seen on the stacks of all threads.
    """

    __slots__ = ("_calls",)

    def __init__(self) -> None:
        self._calls: dict[str, FrameType] = {}

    def enter(self) -> bool:
        """Whether the caller may run, for no other call does that entered before it."""
        caller = sys._getframe(1)
        entered = self._calls.setdefault("sole", caller)
        if entered is not caller and _runs(entered):
            return False
        self._calls["sole"] = caller
        return True

    def leave(self) -> None:
        """The caller, which has entered, is done."""
        self._calls.clear()


def _runs(call: FrameType) -> bool:
    for frame in sys._current_frames().values():
        above: FrameType | None = frame
        while above is not None and above is not call:
            above = above.f_back
        if above is call:
            return True
    return False
