"""Faults that are planted at run time: what replaces a function, a constant or a call of a pass.

A plant is a function of a :class:`Planting`. Places are named from the package on, such as
``ops.quantize.saturate`` or ``ir.edit.Editor.take``; names of torch and numpy begin with theirs. A
name that is not there is an error, so a plant that no longer fits says so.
"""

import importlib
import inspect
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import fx

_ABSENT = object()


@dataclass
class Planting:
    """What is planted in this process.

    Attributes:
        sites: the rewrites, by their numbers within a pass, that were made wrong where the plant
            can tell.
    """

    sites: set[int] = field(default_factory=set)
    _undo: list[Callable[[], None]] = field(default_factory=list)

    def put(self, place: str, value: Any) -> None:
        """Give a name another value; whoever has taken the old one from there keeps it."""
        owner, name = _find(place)
        self._undo.append(_put(owner, name, value))

    def wrap(self, place: str, new: Callable[..., Any]) -> None:
        """Let ``new(whole, …)`` run in place of ``whole(…)``.

        A function of Python's own keeps its identity and takes another code, so that all have the
        fault who imported it, registered it as an operator or bound it to a call.
        """
        owner, name = _find(place)
        old = inspect.getattr_static(owner, name)
        if isinstance(old, property):
            old = old.fget
        old = getattr(old, "__func__", old)
        if not isinstance(old, types.FunctionType):
            self._undo.append(_put(owner, name, _bound_to(new, old)))
            return
        whole = types.FunctionType(old.__code__, old.__globals__, name, None, old.__closure__)
        whole.__defaults__, whole.__kwdefaults__ = old.__defaults__, old.__kwdefaults__
        slot = f"_planted_{id(whole)}"
        old.__globals__[slot] = _bound_to(new, whole)
        old.__code__ = _calling(slot, whole.__code__)
        old.__defaults__ = old.__kwdefaults__ = None

        def undo() -> None:
            old.__code__ = whole.__code__
            old.__defaults__, old.__kwdefaults__ = whole.__defaults__, whole.__kwdefaults__
            del old.__globals__[slot]

        self._undo.append(undo)

    def undo(self) -> None:
        """Take everything out, the last first."""
        while self._undo:
            self._undo.pop()()


Plant = Callable[[Planting], None]
Args = tuple[Any, ...]
Change = Callable[[Any, Any, Args], tuple[Any, Args]]
"""Of a call that a pass inserts: takes the editor, the operator and its arguments; gives both."""


@contextmanager
def planted(plant: Plant) -> Iterator[Planting]:
    """A fault, for as long as the context is open."""
    planting = Planting()
    try:
        plant(planting)
        yield planting
    finally:
        planting.undo()


def _find(place: str) -> tuple[Any, str]:
    *parts, name = place.split(".")
    if parts[0] not in ("torch", "numpy"):
        parts.insert(0, "dsa_compile")
    owner: Any = importlib.import_module(parts[0])
    for end in range(2, len(parts) + 1):
        module = ".".join(parts[:end])
        try:
            owner = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name != module:
                raise
            owner = getattr(owner, parts[end - 1])
    getattr(owner, name)  # an error where it is not
    return owner, name


def _put(owner: Any, name: str, value: Any) -> Callable[[], None]:
    """Set an attribute; gives what takes it back."""
    before = vars(owner).get(name, _ABSENT)
    setattr(owner, name, value)

    def undo() -> None:
        if before is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, before)

    return undo


def _bound_to(new: Callable[..., Any], whole: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: new(whole, *args, **kwargs)


def _calling(slot: str, like: types.CodeType) -> types.CodeType:
    """Code that passes everything on to a global function; it stands where ``like`` does."""
    made: dict[str, Any] = {}
    exec(f"def passing(*args, **kwargs): return {slot}(*args, **kwargs)", made)
    return made["passing"].__code__.replace(
        co_filename=like.co_filename,
        co_firstlineno=like.co_firstlineno,
        co_name=like.co_name,
        co_qualname=like.co_qualname,
        co_freevars=like.co_freevars,
    )


def both(*plants: Plant) -> Plant:
    """Several plants that are one fault."""

    def plant(planting: Planting) -> None:
        for each in plants:
            each(planting)

    return plant


def put(place: str, value: Any) -> Plant:
    """Another value under a name."""
    return lambda planting: planting.put(place, value)


def wrap(place: str, new: Callable[..., Any]) -> Plant:
    """``new(whole, …)`` in place of a function."""
    return lambda planting: planting.wrap(place, new)


def result(place: str, change: Callable[..., Any]) -> Plant:
    """A function's result is what ``change(result, …)`` makes of it and of the arguments."""
    return wrap(place, lambda whole, *args, **kw: change(whole(*args, **kw), *args, **kw))


def here(place: str, new: Callable[..., Any]) -> Plant:
    """``new(whole, …)`` under a name of one module alone: others who have the function keep it."""

    def plant(planting: Planting) -> None:
        owner, name = _find(place)
        planting.put(place, _bound_to(new, getattr(owner, name)))

    return plant


@contextmanager
def replaced(place: str, new: Callable[..., Any]) -> Iterator[None]:
    """``new(whole, …)`` under a name, for as long as the context is open."""
    owner, name = _find(place)
    undo = _put(owner, name, _bound_to(new, getattr(owner, name)))
    try:
        yield
    finally:
        undo()


def within(place: str, callee: str, new: Callable[..., Any]) -> Plant:
    """While a function runs, ``new(whole, …)`` takes the place of a callee, for all who call it."""

    def run(whole: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with replaced(callee, new):
            found = whole(*args, **kwargs)
            return iter(list(found)) if inspect.isgenerator(found) else found

    return wrap(place, run)


def given_to(place: str, **values: Any) -> Plant:
    """Arguments of a function, by name, are others: a value, or a function of the right one."""

    def run(whole: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        bound = inspect.signature(whole).bind(*args, **kwargs)
        bound.apply_defaults()
        for name, value in values.items():
            right = bound.arguments[name]
            bound.arguments[name] = value(right) if callable(value) else value
        return whole(*bound.args, **bound.kwargs)

    return wrap(place, run)


def operator_named(name: str) -> Any:
    """An operator of torch: ``dsa.router``, ``aten.mul.Tensor``."""
    import torch

    space, op, *overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, space), op), *overload or ["default"])


def is_call(target: Any, name: str) -> bool:
    """Whether the target of a call has a name as in :func:`operator_named`, or is ``getitem``."""
    return str(target).removesuffix(".default") == name or getattr(target, "__name__", "") == name


def inserting(
    pass_name: str, op: str, change: Change, *, region: str = "", path: str = ""
) -> Plant:
    """Alter calls of ``op`` that a pass inserts.

    Args:
        pass_name: which; several with blanks between them, the culprit first.
        op: name of the operator.
        change: makes the operator and its arguments wrong.
        region: begins the names of the regions in which it does: a kind, or a name.
        path: part of the module paths at which it does.
    """

    def plant(planting: Planting) -> None:
        def call(whole: Any, edit: Any, target: Any, *args: Any, **options: Any) -> fx.Node:
            at = options.get("path") or options["before"].meta.get("path", "")
            here = edit.pass_name in pass_name.split() and is_call(target, op) and path in at
            if here and edit.region.name.startswith(region):
                right = target, args
                target, args = change(edit, target, args)
                if (target, args) != right and edit.pass_name == pass_name.split()[0]:
                    planting.sites.add(edit._notes.number)
            made: fx.Node = whole(edit, target, *args, **options)
            return made

        planting.wrap("ir.edit.Editor.call", call)

    return plant


def taking(pass_name: str, change: Callable[[int, str], tuple[int, str]]) -> Plant:
    """Of a call with several results passes take another, or give it another name.

    Args:
        pass_name: as for :func:`inserting`.
        change: of the result's number and its name.
    """

    def plant(planting: Planting) -> None:
        def take(whole: Any, edit: Any, several: Any, index: int, old: Any, name: str) -> Any:
            if edit.pass_name in pass_name.split():
                if edit.pass_name == pass_name.split()[0]:
                    planting.sites.add(edit._notes.number)
                index, name = change(index, name)
            return whole(edit, several, index, old, name)

        planting.wrap("ir.edit.Editor.take", take)

    return plant


def afterwards(place: str, change: Callable[..., Any]) -> Plant:
    """Alter what a method ``(self, edit, …)`` of a pass left.

    ``change`` takes what the method takes after ``self``, and says False where it changes nothing.
    """

    def plant(planting: Planting) -> None:
        def run(whole: Any, self: Any, edit: Any, *rest: Any) -> Any:
            found = whole(self, edit, *rest)
            if change(edit, *rest) is not False:
                planting.sites.add(len(edit._notes._journal.sites))
            return found

        planting.wrap(place, run)

    return plant
