"""Calls in exact arithmetic by tape: the small ops of a call serve all calls that are alike."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dsa_compile.verify.execution.recording import Recording
from dsa_compile.verify.execution.tapes import Tape

_LARGEST = 1 << 14  # numbers that are compared to find out whether two calls are alike
_MISSES = 16  # so many calls in a row that are not alike, and the next are not compared
_MOST = 512  # of one layout that are kept with what was read
_UNRECORDED = 2  # calls that are alike before one is recorded: half of those met twice never return
_UNREAD = 3  # the same where numbers were read on the host: these are others in most calls
_TRIED = 16  # tapes that differ in computed numbers

_PLAIN = frozenset({int, bool, str, type(None), torch.dtype, torch.device, torch.layout,
                    torch.memory_format})  # fmt: skip


@dataclass
class _Alike:
    """Calls of one function on one layout.

    Calls whose ``reads``, numbers of inputs, are equal have tapes in common, that of the last call
    first: numbers that are computed may tell the calls apart. Recording a call takes as long as
    running it a few times, so ``met`` counts calls that are not recorded, by what they read.
    """

    reads: tuple[int, ...] = ()
    met: dict[tuple[bytes, ...], int] = field(default_factory=dict)
    tapes: dict[tuple[bytes, ...], list[tuple[Tape, Any]]] = field(default_factory=dict)
    misses: int = 0
    off: bool = False


@dataclass
class Call:
    """A call to be run by a tape or to be recorded.

    Attributes:
        inputs: fp64 numbers of exact tensors, and other tensors.
    """

    inputs: list[Tensor]
    _given: list[Tensor]
    _alike: _Alike
    _tapes: list[tuple[Tape, Any]]

    def play(self, special: Callable[..., Any]) -> tuple[Any] | None:
        """Run a tape in the function's place.

        Returns:
            What the function returns, as the one entry of a tuple; None if no tape does for this
            call, and nothing is done then.
        """
        for place, (tape, results) in enumerate(self._tapes):
            made = tape(self.inputs, special)
            if made is not None:
                self._alike.misses = 0
                if place:
                    self._tapes.insert(0, self._tapes.pop(place))
                return (_filled(results, made, self._given),)
        return None

    def keep(self, recording: Recording, made: Any) -> None:
        """Make a tape.

        Args:
            recording: of the call.
            made: what it returned.
        """
        mine, reads = self._alike, set(self._alike.reads) | recording.reads
        if reads != set(mine.reads):
            mine.tapes.clear()
            mine.met.clear()
        mine.reads = tuple(sorted(reads))
        slots: list[int] = []
        results = _form(made, recording, self._given, slots)
        tape = None
        if results is not None and all(_comparable(self._given[n]) for n in mine.reads):
            tape = recording.tape(slots)
        mine.misses += 1
        mine.off = tape is None or mine.misses > _MISSES
        if mine.off or len(mine.tapes) >= _MOST:
            mine.tapes.clear()
        if tape is not None and not mine.off:
            tapes = mine.tapes.setdefault(_contents(self.inputs, mine.reads), [])
            tapes.insert(0, (tape, results))
            del tapes[_TRIED:]


class TapedCalls:
    """Tapes of calls by function, layouts of tensors and other arguments."""

    def __init__(self) -> None:
        self._known: dict[Hashable, _Alike] = {}

    def call(
        self, function: Any, args: Sequence[Any], kwargs: dict[str, Any], noisy: bool
    ) -> Call | None:
        """A call with the tapes that may do for it; None for one that has to be run as it is.

        Args:
            function: of tensors and constants.
            args: its arguments.
            kwargs: the same by name.
            noisy: whether operands of products are made wrong.
        """
        given: list[Tensor] = []
        parts: list[Hashable] = [function, noisy, *kwargs]
        if not _describe((*args, *kwargs.values()), parts, given) or not given:
            return None
        inputs = [getattr(value, "wide", value) for value in given]
        parts.append(_shared(given, inputs))
        alike = self._known.setdefault(tuple(parts), _Alike())
        if alike.off:
            return None
        contents = _contents(inputs, alike.reads)
        tapes = alike.tapes.get(contents, [])
        if not tapes:
            met = alike.met[contents] = alike.met.get(contents, 0) + 1
            if met <= (_UNREAD if alike.reads else _UNRECORDED):
                if len(alike.met) > _MOST:
                    alike.met.clear()
                return None
        return Call(inputs, given, alike, tapes)


def _describe(value: Sequence[Any], parts: list[Hashable], given: list[Tensor]) -> bool:
    """Add what tells arguments apart to ``parts``, tensors to ``given``; False if it cannot."""
    for entry in value:
        kind = type(entry)
        if kind is Tensor or hasattr(entry, "wide"):
            if not entry.is_cpu:
                return False
            inner = getattr(entry, "wide", entry)
            parts.append((kind, entry.dtype, inner.shape, inner.stride()))
            given.append(entry)
        elif kind in _PLAIN:
            parts.append((kind, entry))
        elif kind is float:
            parts.append((kind, repr(entry)))
        elif isinstance(entry, list | tuple):
            parts.append((kind, len(entry)))
            if not _describe(entry, parts, given):
                return False
        else:
            return False
    return True


def _shared(given: Sequence[Tensor], inputs: Sequence[Tensor]) -> tuple[int, ...]:
    """First places of each tensor, of its numbers and of its memory among those given."""
    if len(given) < 2:
        return ()
    first: dict[tuple[str, int], int] = {}
    places = []
    for place, (value, inner) in enumerate(zip(given, inputs, strict=True)):
        memory = inner.untyped_storage()._cdata
        those = ("tensor", id(value)), ("numbers", id(inner)), ("memory", memory)
        places += [first.setdefault(same, place) for same in those]
    return tuple(places)


def _comparable(value: Tensor) -> bool:
    return type(value) is Tensor and not value.is_floating_point() and value.numel() <= _LARGEST


def _contents(inputs: Sequence[Tensor], reads: Sequence[int]) -> tuple[bytes, ...]:
    return tuple([inputs[number].numpy().tobytes() for number in reads])


@dataclass(frozen=True)
class _Made:
    """A tensor that a tape returns, by its place; of a class that says a dtype, or plain."""

    place: int
    wrapped: Callable[..., Tensor] | None
    dtype: torch.dtype


@dataclass(frozen=True)
class _Given:
    """A tensor that was given."""

    place: int


def _form(value: Any, recording: Recording, given: Sequence[Tensor], slots: list[int]) -> Any:
    """Describe how a tape makes a result; None if it cannot."""
    if isinstance(value, Tensor):
        for place, other in enumerate(given):
            if other is value:
                return _Given(place)
        number = recording.slot(getattr(value, "wide", value))
        if number is None:
            return None
        slots.append(number)
        return _Made(len(slots) - 1, None if type(value) is Tensor else type(value), value.dtype)
    if type(value) in (list, tuple):
        parts = [_form(entry, recording, given, slots) for entry in value]
        return None if any(part is None for part in parts) else type(value)(parts)
    return (value,) if value is None else None


def _filled(form: Any, made: Sequence[Tensor], given: Sequence[Tensor]) -> Any:
    if type(form) is _Made:
        wide = made[form.place]
        return wide if form.wrapped is None else form.wrapped(wide, form.dtype)
    if type(form) is _Given:
        return given[form.place]
    if form == (None,):
        return None
    return type(form)([_filled(part, made, given) for part in form])
