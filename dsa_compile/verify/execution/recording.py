"""Record a tape: the ops that a function runs, and what else a call must have to run the same."""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from dsa_compile.verify.execution.tapes import Op, Slot, Tape, slots_in

aten = torch.ops.aten

_READS = frozenset({Tensor.tolist, Tensor.numpy, Tensor.__array__})  # without running an op
_MASKS = (torch.bool, torch.uint8)
_ALIASES = frozenset({aten.alias.default, aten.detach.default, aten.lift_fresh.default})
_COPIES = frozenset({aten._to_copy.default, aten.clone.default})


class Recording(TorchFunctionMode):
    """Writes down the ops of a function while it runs; to be on meanwhile.

    Args:
        inputs: tensors that other calls will have others in place of.
        special: a function whose calls will be those of another.
    """

    def __init__(self, inputs: Sequence[Tensor], special: Callable[..., Any]) -> None:
        super().__init__()
        self._special = special
        self._inputs = len(inputs)
        self._slots: dict[int, int] = {}
        self._kept: list[Tensor] = []  # by slot: no other tensor may get the identity of one
        self._storages: list[int] = []  # by slot
        self._constants: list[int] = []  # slots
        self._ops: list[Op] = []
        self._sources: dict[int, int] = {}  # inputs that went into a storage, a bit for each
        self._written: set[int] = set()  # storages
        self._read_from: set[int] = set()
        self._reads = 0
        self._whole = True
        for number, value in enumerate(inputs):
            slot = self._new(value)
            self._sources[self._storages[slot]] |= 1 << number
        self._given = set(self._storages)

    @property
    def reads(self) -> set[int]:
        """Numbers of the inputs of which something was read on the host without an op."""
        return {number for number in range(self._inputs) if self._reads >> number & 1}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note what is read on the host."""
        if func in _READS:
            self._read(args[0])
        return func(*args, **(kwargs or {}))

    def run(self, function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run an op and write it down."""
        taken: list[Tensor] = []
        before = (self._with_slots(args, taken), self._with_slots(kwargs, taken))
        facts = _NONE if function == self._special else _facts(function)
        written = [] if not facts.writes else list(tensors_in(_written(facts, args, kwargs)))
        layouts = [(value.shape, value.stride()) for value in written]
        try:
            with torch._C.DisableTorchFunction():  # it reads again on the tape what it reads itself
                made = function(*args, **kwargs)
        except BaseException:
            self._whole = False  # the function may go on without what this op was to make
            raise
        known: Any = None
        if type(made) in (bool, int, float):  # which Python may do anything with
            known = made
        elif facts.shapes and (function is not aten.index.Tensor or _masked(args[1])):
            known = [tuple(value.shape) for value in tensors_in(made)]
        if known is not None and self._repeated(function, *before):
            known = None
        if known is not None:
            self._whole &= not self._given & self._written  # it could not be begun again
            self._whole &= all(op.function != self._special for op in self._ops)
        self._whole &= layouts == [(value.shape, value.stride()) for value in written]
        self._whole &= function is not aten.as_strided.default
        self._whole &= not (facts.random and _drops(function, args, kwargs))
        places = self._places(made)
        sources = 0
        for value in taken:
            sources |= self._sources[self._storages[self._slots[id(value)]]]
        for slot in (*(self._slots[id(value)] for value in written), *slots_in(places)):
            self._sources[self._storages[slot]] |= sources
        self._written |= {self._storages[self._slots[id(value)]] for value in written}
        copies = (
            function in _COPIES
            and made.dtype is args[0].dtype
            and (made.shape, made.stride()) == (args[0].shape, args[0].stride())
        )
        self._ops.append(Op(function, *before, places, bool(written), copies, known))
        return made

    def give_up(self) -> None:
        """Make no tape: what runs now is not written down."""
        self._whole = False

    def slot(self, value: Tensor) -> int | None:
        """Slot of a tensor on the tape; None if no op made it."""
        number = self._slots.get(id(value))
        return None if number in self._constants else number

    def tape(self, results: Sequence[int]) -> Tape | None:
        """The tape, made of what ran so far; None if it would not do for any other inputs.

        Args:
            results: slots whose tensors it returns.
        """
        constants = {self._storages[number] for number in self._constants}
        read = self._given & self._read_from | {self._storages[number] for number in self.reads}
        returned = {self._storages[number] for number in results}
        if not self._whole or self._written & (constants | read) or returned & constants:
            return None
        clones = {number: self._kept[number].clone() for number in self._constants}
        renamed: dict[int, int] = {}
        kept = []
        for op in self._ops:
            op.args, op.kwargs = _renamed(op.args, renamed), _renamed(op.kwargs, renamed)
            if not (op.function in _ALIASES or self._needless(op, returned)) or (
                op.results.number in results
            ):
                op.function = None if op.function == self._special else op.function
                kept.append(op)
            else:
                renamed[op.results.number] = op.args[0].number
        return Tape(kept, self._inputs, clones, results)

    def _needless(self, op: Op, returned: set[int]) -> bool:
        """Whether a copy may be what it is a copy of: nothing is written to either."""
        if not op.copies:
            return False
        mine, its = (self._storages[slot.number] for slot in (op.results, op.args[0]))
        if its in self._given and self._given & self._written:
            return False  # other inputs may share memory where these do not
        return not {mine, its} & self._written and mine not in returned

    def _repeated(self, function: Any, args: Any, kwargs: Any) -> bool:
        """Whether an op makes again what another made: then nothing new is known by it."""
        same: dict[int, int] = {}
        first: dict[str, Any] = {}
        for op in self._ops:
            places = [*slots_in(op.args), *slots_in(op.kwargs)]
            if op.writes or any(self._storages[number] in self._written for number in places):
                continue
            results = first.setdefault(_told(op.function, op.args, op.kwargs, same), op.results)
            same |= zip(slots_in(op.results), slots_in(results), strict=True)
        return _told(function, args, kwargs, same) in first

    def _read(self, value: Any) -> None:
        storage = self._storages[self._slot(getattr(value, "wide", value))]
        self._read_from.add(storage)
        self._reads |= self._sources[storage]

    def _new(self, value: Tensor) -> int:
        storage = value.untyped_storage()._cdata
        slot = self._slots[id(value)] = len(self._kept)
        self._kept.append(value)
        self._storages.append(storage)
        self._sources.setdefault(storage, 0)
        return slot

    def _slot(self, value: Tensor) -> int:
        """The slot of a tensor that an op takes: a constant if nothing made it."""
        slot = self._slots.get(id(value))
        if slot is None:
            slot = self._new(value)
            self._constants.append(slot)
        return slot

    def _with_slots(self, value: Any, taken: list[Tensor]) -> Any:
        if isinstance(value, Tensor):
            taken.append(value)
            return Slot(self._slot(value))
        if isinstance(value, list | tuple):
            return [self._with_slots(entry, taken) for entry in value]
        if isinstance(value, dict):
            return {name: self._with_slots(entry, taken) for name, entry in value.items()}
        return value

    def _places(self, made: Any) -> Any:
        if isinstance(made, Tensor):
            slot = self._slots.get(id(made))
            return Slot(self._new(made) if slot is None else slot)
        if isinstance(made, list | tuple):
            return [self._places(entry) for entry in made]
        return None


@dataclass(frozen=True)
class _Facts:
    """Places and names of the operands that an op writes, whether numbers decide the shape of its
    result, and whether it may draw random ones."""

    writes: tuple[tuple[int, str], ...]
    shapes: bool
    random: bool


_NONE = _Facts((), False, False)


@functools.cache
def _facts(function: Any) -> _Facts:
    schema = getattr(function, "_schema", None)
    arguments = () if schema is None else schema.arguments
    writes = [
        (place, argument.name)
        for place, argument in enumerate(arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    tags = getattr(function, "tags", ())
    random = torch.Tag.nondeterministic_seeded in tags
    return _Facts(tuple(writes), torch.Tag.dynamic_output_shape in tags, random)


def _drops(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether an op that may draw random numbers does: attention draws none without dropout."""
    for place, argument in enumerate(function._schema.arguments):
        if argument.name == "dropout_p":
            given = args[place] if place < len(args) else kwargs.get("dropout_p", 0.0)
            return bool(given)
    return True


def _masked(indices: Any) -> bool:
    return any(value.dtype in _MASKS for value in tensors_in(indices))


def _written(facts: _Facts, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    return [args[place] if place < len(args) else kwargs.get(name) for place, name in facts.writes]


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in lists and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from tensors_in(entry)


def _told(function: Any, args: Any, kwargs: Any, same: dict[int, int]) -> str:
    """A text that tells an op from others, on slots some of which are the ``same`` as others."""
    return repr((function, _renamed(args, same), _renamed(kwargs, same)))


def _renamed(value: Any, renamed: dict[int, int]) -> Any:
    if isinstance(value, Slot):
        return Slot(renamed.get(value.number, value.number))
    if isinstance(value, list):
        return [_renamed(entry, renamed) for entry in value]
    if isinstance(value, dict):
        return {name: _renamed(entry, renamed) for name, entry in value.items()}
    return value
