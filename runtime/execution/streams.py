"""The stream ops of a graph on CUDA streams and events, run eagerly or captured.

In a CUDA graph an event becomes an edge between kernels: a side stream joins the capture with its
first wait for stream 0, and must be waited for before the capture ends. Graphs that are not so are
refused when an artifact is opened (:mod:`dsa_compile.ir.hazards`).
"""

import functools
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from dsa_compile.ir.streams import MAIN
from dsa_compile.ops import KEEP_ALIVE, ON_STREAM, RECORD_EVENT, WAIT_EVENT


class SideStreams:
    """Streams 1, 2, … of whatever runs one region at a time, each made when first used.

    Their kernels go before those of stream 0 where both are ready: they are the small ones, for
    which a large one may otherwise leave no room until it ends.
    """

    def __init__(self) -> None:
        self._made: dict[int, torch.cuda.Stream] = {}

    def __getitem__(self, number: int) -> torch.cuda.Stream:
        """The stream of that number, on the current device."""
        found = self._made.get(number)
        if found is None:
            found = self._made[number] = torch.cuda.Stream(priority=-1)
        return found

    def made(self) -> tuple[torch.cuda.Stream, ...]:
        """Streams used so far."""
        return tuple(self._made.values())


class StreamSwitch:
    """Functions of one region's stream ops, over its streams and their events.

    Args:
        side: the region's side streams; its stream 0 is the current one of each call.
    """

    def __init__(self, side: SideStreams) -> None:
        self._side = side
        self._events: dict[int, torch.cuda.Event] = {}
        self._main: torch.cuda.Stream | None = None
        self._current: torch.cuda.Stream | None = None

    def function(self, op: OpOverload) -> Callable[..., None]:
        """The function that stands for a stream op."""
        made: dict[OpOverload, Callable[..., None]] = {
            ON_STREAM: self._on_stream,
            RECORD_EVENT: self._record_event,
            WAIT_EVENT: self._wait_event,
            KEEP_ALIVE: _keep_alive,
        }
        return made[op]

    def around(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """``forward``, with the caller's stream as stream 0, and left current even by an error.

        After an error the caller's stream waits for the side streams: what they still run may use
        memory that is given out again as soon as the error is handled, and a capture cannot end
        before they are joined.
        """

        @functools.wraps(forward)
        def call(*args: Tensor) -> Any:
            main = self._main = self._current = torch.cuda.current_stream()
            try:
                return forward(*args)
            except BaseException:
                torch.cuda.set_stream(main)
                self._join(main)
                raise

        return call

    def _join(self, main: torch.cuda.Stream) -> None:
        """Let ``main`` wait for the side streams, in a capture for those that take part in it."""
        capturing = torch.cuda.is_current_stream_capturing()
        with suppress(RuntimeError):  # of a lost device: the first error is the one to be told
            for side in self._side.made():
                torch.cuda.set_stream(side)
                alike = torch.cuda.is_current_stream_capturing() == capturing
                torch.cuda.set_stream(main)
                if alike:
                    main.wait_stream(side)

    def _on_stream(self, stream: int) -> None:
        current = self._main if stream == MAIN else self._side[stream]
        assert current is not None
        torch.cuda.set_stream(current)
        self._current = current

    def _record_event(self, event: int) -> None:
        found = self._events.get(event)
        if found is None:
            found = self._events[event] = torch.cuda.Event()
        found.record(self._current)

    def _wait_event(self, event: int) -> None:
        self._events[event].wait(self._current)


def _keep_alive(tensors: Sequence[Tensor]) -> None:
    """Do nothing: the generated code has held the tensors for this call until now."""
