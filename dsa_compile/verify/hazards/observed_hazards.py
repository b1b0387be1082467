"""Hazards of a region as it stands, and as the runtime's streams run it."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

from dsa_compile.ir.region import Region
from dsa_compile.ops import STREAM_OPS
from dsa_compile.runtime.execution import streams
from dsa_compile.verify.hazards.launch_log import (
    GraphStreams,
    Log,
    Recorded,
    Waited,
    run_region,
)
from dsa_compile.verify.hazards.order import Unordered, unordered


def graph_hazards(region: Region) -> list[Unordered]:
    """Work that the stream ops of a region leave unordered.

    Args:
        region: of the KERNEL level.
    """
    if not _overlapped(region):
        return []
    log = Log()
    run_region(region, log, GraphStreams(log))
    return list(unordered(log))


def runtime_hazards(region: Region) -> list[Unordered]:
    """Work that the runtime's streams leave unordered, on a device that only takes notes.

    Args:
        region: of the KERNEL level.
    """
    if not _overlapped(region):
        return []
    log = Log()
    with mock.patch.object(streams, "torch", SimpleNamespace(cuda=_Device(log))):
        run_region(region, log, streams.StreamSwitch(streams.SideStreams()))
    return list(unordered(log))


def _overlapped(region: Region) -> bool:
    return any(node.target in STREAM_OPS for node in region.graph.nodes)


class _Stream:
    def __init__(self, device: "_Device", number: int) -> None:
        self.device, self.number = device, number

    def wait_event(self, event: "_Event") -> None:
        event.wait(self)

    def wait_stream(self, other: "_Stream") -> None:
        event = _Event(self.device)
        event.record(other)
        event.wait(self)


class _Event:
    def __init__(self, device: "_Device") -> None:
        self._device, self._number = device, device.next_event()

    def record(self, stream: _Stream | None = None) -> None:
        on = stream or self._device.current
        self._device.log.entries.append(Recorded(self._number, on.number))

    def wait(self, stream: _Stream | None = None) -> None:
        on = stream or self._device.current
        self._device.log.entries.append(Waited(self._number, on.number))


class _Device:
    """Device that takes notes, in place of ``torch.cuda`` in the runtime."""

    def __init__(self, log: Log) -> None:
        self.log = log
        self._streams = [_Stream(self, 0)]
        self._events = 0

    @property
    def current(self) -> _Stream:
        return self._streams[self.log.current]

    def next_event(self) -> int:
        self._events += 1
        return self._events

    def Stream(self, *args: Any, **kwargs: Any) -> _Stream:  # noqa: N802
        self._streams.append(_Stream(self, len(self._streams)))
        return self._streams[-1]

    def Event(self, *args: Any, **kwargs: Any) -> _Event:  # noqa: N802
        return _Event(self)

    def current_stream(self, *args: Any) -> _Stream:
        return self.current

    def set_stream(self, stream: _Stream) -> None:
        self.log.current = stream.number

    def is_current_stream_capturing(self) -> bool:
        return False
