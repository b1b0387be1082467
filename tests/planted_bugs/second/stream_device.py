"""A device with streams on the CPU that is as late as the events allow, to show races by.

The stream ops of a region run on :class:`~dsa_compile.runtime.execution.streams.StreamSwitch` over
streams that queue their work. Memory that the host has let go of is overwritten by the next work of
the stream that it was made on. Nothing here knows the planner or the checker of hazards.
"""

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.utils._pytree
from torch import Tensor, fx

aten = torch.ops.aten
# Kernels where the layout asks for a copy: they count as work of their stream.
_MAYBE_COPIES = {
    aten.contiguous.default,
    aten.flatten.using_ints,
    aten.reshape.default,
    aten.to.dtype,
}

POLICIES = ("main first", "side first")


class _Stream:
    def __init__(self, device: "Device", priority: int = 0) -> None:
        self.device, self.number = device, len(device.streams)
        self.work: list[tuple[Callable[[], None] | None, _Event | None, int]] = []
        self.freed: list[_Memory] = []
        device.streams.append(self)

    def wait_stream(self, other: "_Stream") -> None:
        event = self.device.event()
        event.record(other)
        self.wait_event(event)

    def wait_event(self, event: "_Event") -> None:
        self.work.append((None, event, event.version))


class _Event:
    def __init__(self, device: "Device") -> None:
        self.device, self.version, self.reached = device, 0, 0

    def record(self, stream: _Stream | None = None) -> None:
        self.version += 1
        version = self.version

        def reach() -> None:
            self.reached = max(self.reached, version)

        (stream or self.device.current).work.append((reach, None, 0))

    def wait(self, stream: _Stream | None = None) -> None:
        (stream or self.device.current).wait_event(self)


class _Memory:
    """A piece of memory that the host holds as long as this object lives."""

    def __init__(self, stream: _Stream | None, cells: list[Any]) -> None:
        self.stream, self.cells = stream, cells

    def __del__(self) -> None:
        if self.stream is not None:
            self.stream.freed.append(_Freed(self.cells))  # type: ignore[arg-type]


class _View:
    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make


class _Freed:
    def __init__(self, cells: list[Any]) -> None:
        self.cells = cells


class _Handle:
    """Handle that the host has of a result: where it will be, and the memory that it keeps."""

    def __init__(self, cell: Any, memory: tuple[_Memory, ...]) -> None:
        self.cell, self.memory = cell, memory


class Device:
    """Streams, and the functions that queue a region's calls on them."""

    def __init__(self) -> None:
        self.streams: list[_Stream] = []
        self.main = self.current = _Stream(self)

    def event(self, **_: Any) -> _Event:
        """A new event."""
        return _Event(self)

    def patches(self) -> Mapping[str, Any]:
        """Stand-ins for names of ``torch.cuda``."""

        def set_stream(stream: _Stream) -> None:
            self.current = stream

        return {
            "Stream": lambda priority=0, **_: _Stream(self, priority),
            "Event": self.event,
            "current_stream": lambda *_: self.current,
            "set_stream": set_stream,
            "is_current_stream_capturing": lambda: False,
        }

    def function(self, node: fx.Node) -> Callable[..., Any]:
        """Function in place of a call: queues its reference, and gives a handle of its result."""
        schema = getattr(node.target, "_schema", None)
        several = len(schema.returns) if schema is not None else 1
        aliases = schema is None or any(r.alias_info is not None for r in schema.returns)

        def view(*args: Any, **kwargs: Any) -> _Handle:
            """No work of any stream: made where it is read."""
            memory = tuple(m for handle in _handles((args, kwargs)) for m in handle.memory)
            given = _cells((args, kwargs))

            def make() -> Any:
                known, named = _values(given)
                return node.target(*known, **named)

            return _Handle(_View(make), memory)

        def call(*args: Any, **kwargs: Any) -> Any:
            stream = self.current
            cells: list[list[Any]] = [[None] for _ in range(several)]
            kept: tuple[_Memory, ...] = ()
            if aliases:  # perhaps a copy, perhaps a view
                kept = tuple(m for handle in _handles((args, kwargs)) for m in handle.memory)
            results = [_Handle(cell, (_Memory(stream, cell), *kept)) for cell in cells]
            given = _cells((args, kwargs))
            for freed in stream.freed:
                stream.work.append((_overwrite(freed.cells), None, 0))
            stream.freed.clear()

            def run() -> None:
                known, named = _values(given)
                made = node.target(*known, **named)
                if several == 1:
                    made = (made,)
                for cell, value in zip(cells, made or (), strict=True):
                    cell[0] = value

            stream.work.append((run, None, 0))
            return results[0] if several == 1 else tuple(results) if several else None

        if node.target is operator.getitem:
            return lambda value, index: (
                value[index] if isinstance(value, tuple) else view(value, index)
            )
        return view if aliases and node.target not in _MAYBE_COPIES else call

    def drain(self, policy: str) -> None:
        """Run what the main stream needs, either late or early on the other streams."""
        order = self.streams if policy == "main first" else [*self.streams[1:], self.main]
        while True:
            for stream in order:
                if self._step(stream):
                    break
            else:
                return

    def _step(self, stream: _Stream) -> bool:
        if not stream.work:
            return False
        run, event, version = stream.work[0]
        if event is not None and event.reached < version:
            return False
        del stream.work[0]
        if run is not None:
            run()
        return True


def given(tensor: Tensor) -> _Handle:
    """An input of a region, which the caller keeps."""
    return _Handle([tensor], ())


def _overwrite(cell: list[Any]) -> Callable[[], None]:
    def run() -> None:
        for tensor in torch.utils._pytree.tree_leaves(cell):
            if isinstance(tensor, Tensor):
                tensor.untyped_storage().fill_(255)

    return run


class _Cell:
    def __init__(self, cell: Any) -> None:
        self.cell = cell


def value_in(cell: Any) -> Any:
    """Value that a handle's cell holds."""
    if isinstance(cell, _View):
        return cell.make()
    if cell[0] is None:
        raise RuntimeError("a stream reads a value before another has made it")
    return cell[0]


def _map(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, tuple | list):
        return type(value)(_map(item, change) for item in value)
    if isinstance(value, dict):
        return {key: _map(item, change) for key, item in value.items()}
    return change(value)


def _handles(value: Any) -> list[_Handle]:
    found: list[_Handle] = []
    _map(value, lambda v: found.append(v) if isinstance(v, _Handle) else None)
    return found


def _cells(value: Any) -> Any:
    return _map(value, lambda v: _Cell(v.cell) if isinstance(v, _Handle) else v)


def _values(value: Any) -> Any:
    def of(item: Any) -> Any:
        if not isinstance(item, _Cell):
            return item
        return value_in(item.cell)

    return _map(value, of)
