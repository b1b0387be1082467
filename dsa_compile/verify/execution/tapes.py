"""Tapes of ops: what a function runs on tensors of some layout, written down and run without it.

A reference of an op is some ten to hundred small ops in Python, and what intercepts each of them
takes longer than the op. Which ops they are depends on layouts, on arguments that are no tensors,
and on numbers that the function reads on the host or that decide a shape. A tape is the list of
ops; it is good for every call that is alike in all of these. A recording makes one
while the function runs, and finds out of which inputs such numbers come.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

# Torch's own bindings of the ops that are met most: they take half the time of an overload's.
_QUICK: dict[Any, Callable[..., Any]] = {
    aten.add.Tensor: torch.add,
    aten.add_.Tensor: Tensor.add_,
    aten.bmm.default: torch.bmm,
    aten.clone.default: torch.clone,
    aten.expand.default: Tensor.expand,
    aten.mm.default: torch.mm,
    aten.mul.Tensor: torch.mul,
    aten.mul_.Tensor: Tensor.mul_,
    aten.select.int: torch.select,
    aten.squeeze.dim: torch.squeeze,
    aten.sub.Tensor: torch.sub,
    aten.t.default: torch.t,
    aten.transpose.int: torch.transpose,
    aten.unsqueeze.default: torch.unsqueeze,
    aten.view.default: Tensor.view,
}
_LITERALS = (int, bool, str, type(None))


@dataclass(frozen=True)
class Slot:
    """The place of a tensor on a tape: its inputs come first, then what its ops make."""

    number: int


@dataclass
class Op:
    """One op on a tape.

    Attributes:
        function: None for the special one.
        args: with slots in place of tensors.
        kwargs: the same by name.
        results: a slot, a list of them and of None, or None.
        writes: whether it writes an operand.
        copies: whether its result is its operand again, in the same layout.
        known: the number that it makes, or the shapes, that the tape is good for alone.
    """

    function: Any
    args: Any
    kwargs: dict[str, Any]
    results: Any
    writes: bool
    copies: bool = False
    known: Any = None


class Tape:
    """Ops to be run on other inputs.

    Args:
        ops: in order.
        inputs: how many there are.
        constants: of the slots that are neither inputs nor made by an op.
        results: slots.
    """

    def __init__(
        self, ops: Sequence[Op], inputs: int, constants: dict[int, Tensor], results: Sequence[int]
    ) -> None:
        self._text = (ops, inputs, constants, results)
        self._run: Callable[..., Sequence[Tensor] | None] | None = None

    def __call__(
        self, inputs: Sequence[Tensor], special: Callable[..., Any]
    ) -> Sequence[Tensor] | None:
        """The results; None where the tape does not do for these inputs, and they are as they were.

        Args:
            inputs: of the layouts that were recorded.
            special: runs in place of the function that was recorded as special.
        """
        if self._run is None:  # many tapes are never played: their layouts do not come again
            ops, count, constants, results = self._text
            self._run = _compiled(_needed(ops, results), count, constants, results)
        return self._run(special, *inputs)


def slots_in(value: Any) -> Iterator[int]:
    """The numbers of the slots in lists and dictionaries."""
    if isinstance(value, Slot):
        yield value.number
    elif isinstance(value, list):
        for entry in value:
            yield from slots_in(entry)
    elif isinstance(value, dict):
        yield from slots_in(list(value.values()))


def _needed(ops: Sequence[Op], results: Sequence[int]) -> list[Op]:
    """The ops that write, are random, may only raise an error, or make what is used."""
    used = set(results)
    kept = []
    for op in reversed(ops):
        kept_as_it_is = op.writes or op.function is None or op.known is not None
        kept_as_it_is |= op.results is None  # all that it does may be to raise an error
        if kept_as_it_is or used & set(slots_in(op.results)):
            used |= {*slots_in(op.args), *slots_in(op.kwargs)}
            kept.append(op)
    return kept[::-1]


def _compiled(
    ops: Sequence[Op], inputs: int, constants: dict[int, Tensor], results: Sequence[int]
) -> Callable[..., Sequence[Tensor] | None]:
    """A function of ``special`` and the inputs, straight-line code over one name for each slot."""
    names: dict[str, Any] = {f"s{number}": value for number, value in constants.items()}
    ids: dict[int, str] = {}

    def text(value: Any) -> str:
        if isinstance(value, Slot):
            return f"s{value.number}"
        if isinstance(value, list):
            return f"[{', '.join(map(text, value))}]"
        if type(value) in _LITERALS or (type(value) is float and math.isfinite(value)):
            return repr(value)
        if id(value) not in ids:
            ids[id(value)] = f"c{len(names)}"
            names[f"c{len(names)}"] = value
        return ids[id(value)]

    last: dict[int, int] = {}
    for place, op in enumerate(ops):
        every = itertools.chain(*map(slots_in, (op.args, op.kwargs, op.results)))
        last |= dict.fromkeys(every, place)
    for number in (*results, *constants, *range(inputs)):
        last.pop(number, None)
    dying: dict[int, list[str]] = {}
    for number, place in last.items():
        dying.setdefault(place, []).append(f"s{number}")
    lines = [f"def run(special, {''.join(f's{number}, ' for number in range(inputs))}):"]
    for place, op in enumerate(ops):
        kwargs = [f"{name}={text(value)}" for name, value in op.kwargs.items()]
        quick = None if kwargs else _QUICK.get(op.function)
        function = "special" if op.function is None else text(quick or _bound(op.function))
        call = f"{function}({', '.join([*map(text, op.args), *kwargs])})"
        if op.results is not None:
            lines.append(f"    {_target(op.results)} = {call}")
            for number, shape in zip(slots_in(op.results), op.known or (), strict=False):
                lines.append(f"    if s{number}.shape != {text(shape)}: return None")
        elif op.known is not None:
            known: Any = op.known
            if known == 0 and type(known) is float:  # of one sign
                call, known = f"repr({call})", repr(known)
            lines.append(f"    if {call} != {text(known)}: return None")
        else:
            lines.append(f"    {call}")
        if place in dying:
            lines.append(f"    del {', '.join(dying[place])}")
    lines.append(f"    return ({''.join(f's{number}, ' for number in results)})")
    exec("\n".join(lines), names)  # the text is made of names and of numbers alone
    run: Callable[..., Sequence[Tensor] | None] = names["run"]
    return run


def _target(results: Any) -> str:
    if isinstance(results, Slot):
        return f"s{results.number}"
    return f"[{', '.join('_' if slot is None else _target(slot) for slot in results)}]"


def _bound(function: Any) -> Any:
    return function._op if isinstance(function, torch._ops.OpOverload) else function
