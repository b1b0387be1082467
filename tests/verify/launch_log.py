"""Log of what a region enqueues on its streams, in the order in which the host does it.

The region is run as the runtime runs it, on tensors without memory: which values share memory is
seen from the storages that torch gives them, when memory is let go of from the death of the
tensors, and the order from the calls that reach streams and events. Neither the planner of streams
nor the checker of hazards is used.
"""

import operator
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves, tree_map

from dsa_compile.ir.execution import compile_region
from dsa_compile.ir.region import Region
from dsa_compile.ops import KEEP_ALIVE, ON_STREAM, RECORD_EVENT, REFERENCE, WAIT_EVENT


@dataclass(eq=False)
class Memory:
    """Memory that one or more tensors are in.

    Attributes:
        name: of the call or input that had it first.
        stream: on which it was made; None for an input's.
    """

    name: str
    stream: int | None


@dataclass(frozen=True)
class Launch:
    """Work of one call on a stream; memory by its number in the log."""

    name: str
    stream: int
    reads: frozenset[int]
    writes: frozenset[int]
    makes: frozenset[int]

    @property
    def uses(self) -> frozenset[int]:
        """Memory that the call reads, writes or makes."""
        return self.reads | self.writes | self.makes


@dataclass(frozen=True)
class Recorded:
    """An event is recorded on a stream."""

    event: int
    stream: int


@dataclass(frozen=True)
class Waited:
    """A stream waits for the last record of an event."""

    event: int
    stream: int


@dataclass(frozen=True)
class Freed:
    """The host has let go of memory: the stream that it was made on may give it out again."""

    memory: int


Entry = Launch | Recorded | Waited | Freed

START, END = "the region's start", "the region's end"


@dataclass
class Log:
    """Work that was enqueued.

    Attributes:
        entries: in the order of the host.
        names: of memory, by number.
        homes: the stream of memory that calls made, by number.
        current: the stream on which the next call is launched.
    """

    entries: list[Entry] = field(default_factory=list)
    names: dict[int, str] = field(default_factory=dict)
    homes: dict[int, int] = field(default_factory=dict)
    current: int = 0

    def memory(self, name: str, stream: int | None) -> Memory:
        """New memory, whose end will be noted if a call made it."""
        made = Memory(name, stream)
        number = len(self.names)
        self.names[number] = name
        made.number = number  # type: ignore[attr-defined]
        if stream is not None:
            self.homes[number] = stream
            weakref.finalize(made, self.entries.append, Freed(number)).atexit = False
        return made


def run_region(region: Region, log: Log) -> None:
    """Run a region of the KERNEL level twice and log what it enqueues: the second call finds the
    events of the first."""
    call = compile_region(region, lambda node: _function(node, log))
    for _ in range(2):
        inputs = [_input(node, log) for node in region.inputs()]
        given = frozenset(_numbers(inputs))
        log.entries.append(Launch(START, 0, frozenset(), given, frozenset()))
        results = call(*inputs)
        log.entries.append(Launch(END, 0, frozenset(_numbers(results)), frozenset(), frozenset()))
        del results


def _function(node: fx.Node, log: Log) -> Callable[..., Any]:
    """Function of a call; every stream op acts on the current stream."""
    given: dict[Any, Callable[..., Any]] = {
        ON_STREAM: lambda stream: setattr(log, "current", stream),
        RECORD_EVENT: lambda event: log.entries.append(Recorded(event, log.current)),
        WAIT_EVENT: lambda event: log.entries.append(Waited(event, log.current)),
        KEEP_ALIVE: lambda tensors: None,
        operator.getitem: operator.getitem,
    }
    return given.get(node.target) or _Logged(node, log)


class _Logged:
    """A call of an op on tensors without memory."""

    def __init__(self, node: fx.Node, log: Log) -> None:
        self.__name__ = node.name
        self._node, self._log = node, log

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        op: Any = self._node.target
        given = set(_numbers((args, kwargs)))
        writes = set(_written(op, args, kwargs))
        if op in REFERENCE:
            results = tree_map(_fresh, self._node.meta.get("val"))
        else:
            results = op(*args, **kwargs)
        made: set[int] = set()
        for result in _tensors(results):
            owner = _sharing(result, (args, kwargs))
            if owner is None and not hasattr(result, "_memory"):
                memory = self._log.memory(self._node.name, self._log.current)
                made.add(memory.number)  # type: ignore[attr-defined]
                result._memory = memory  # type: ignore[attr-defined]
            elif owner is not None:
                result._memory = owner  # type: ignore[attr-defined]
        if made or writes:
            launch = Launch(
                self._node.name,
                self._log.current,
                frozenset(given - writes),
                frozenset(writes),
                frozenset(made),
            )
            self._log.entries.append(launch)
        return results


def _written(op: Any, args: Any, kwargs: Any) -> Iterator[int]:
    """Memory that a schema says is written."""
    for number, argument in enumerate(op._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[number] if number < len(args) else kwargs.get(argument.name)
        yield from _numbers(value)


def _sharing(result: Tensor, given: Any) -> Memory | None:
    """The memory of an argument whose storage a result is in."""
    storage = result.untyped_storage()._cdata
    for value in _tensors(given):
        if value.untyped_storage()._cdata == storage:
            memory: Memory = value._memory  # type: ignore[attr-defined]
            return memory
    return None


def _input(node: fx.Node, log: Log) -> Tensor:
    value: Tensor = _fresh(node.meta["val"])
    value._memory = log.memory(node.name, None)  # type: ignore[attr-defined]
    return value


def _fresh(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    mode: Any = getattr(value, "fake_mode", None)
    assert mode is not None, "a finished graph has types"
    with mode:
        return torch.empty_strided(
            value.size(), value.stride(), dtype=value.dtype, device=value.device
        )


def _tensors(value: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


def _numbers(value: Any) -> Iterator[int]:
    return (tensor._memory.number for tensor in _tensors(value))  # type: ignore[attr-defined]
