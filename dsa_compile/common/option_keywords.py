"""Options as keywords: of the class that has them, and of functions that take them."""

import functools
import inspect
import textwrap
import warnings
from collections.abc import Callable, Collection, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

from dsa_compile.common.names import hint
from dsa_compile.common.options import options_of
from dsa_compile.errors import NAMES, OptionError, UserError

P = ParamSpec("P")
A = TypeVar("A")
B = TypeVar("B")
R = TypeVar("R")
C = TypeVar("C", bound=type)


def has_options(cls: C) -> C:
    """A decorator of dataclasses: they refuse unknown keywords, and describe their options."""
    make, names = cls.__init__, list(inspect.signature(cls).parameters)  # type: ignore[misc]

    @functools.wraps(make)
    def checked(self: object, *args: Any, **given: Any) -> None:
        make(self, *args, **_renamed(f"{cls.__name__}()", given, cls, names))

    cls.__init__ = checked  # type: ignore[misc]
    cls.__doc__ = _described(cls.__doc__, cls)
    return cls


def takes_options(
    cls: type, name: str = "", leave_out: Collection[str] = ()
) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """A decorator of functions whose argument ``options`` may be given as single keywords, too.

    Args:
        cls: of the options; the function always gets one.
        name: that users call the function by; empty: its own.
        leave_out: fields of it that are no keywords.
    """

    def decorate(function: Callable[..., R]) -> Callable[..., R]:
        signature, what = inspect.signature(function), f"{name or function.__qualname__}()"
        own = dict(signature.parameters)
        own["options"] = own["options"].replace(default=None)
        fields = inspect.signature(cls).parameters
        single = {n: p for n, p in fields.items() if n not in own and n not in leave_out}

        names = [name for name in (*own, *single) if name != "cls"]

        @functools.wraps(function)
        def call(*args: Any, **given: Any) -> R:
            given = _renamed(what, given, cls, names)
            bound = shown.bind(*args, **given)
            options = {n: bound.arguments.pop(n) for n in single if n in bound.arguments}
            if options and bound.arguments.get("options") is not None:
                both = f"options={cls.__name__}(...) or single options, not both"
                raise UserError(f"{what}: give {both}")
            bound.arguments["options"] = bound.arguments.get("options") or cls(**options)
            return function(*bound.args, **bound.kwargs)

        shown = signature.replace(parameters=[*own.values(), *single.values()])
        call.__signature__ = shown  # type: ignore[attr-defined]
        call.__doc__ = _described(function.__doc__, cls)
        return call

    return decorate


def keywords_of(
    cls: Callable[P, object],
) -> Callable[[Callable[[A, B], R]], Callable[Concatenate[A, B, P], R]]:
    """A decorator of overloads for type checkers: adds the keywords of a class of options."""
    return lambda function: function  # type: ignore[return-value]


def _renamed(what: str, given: dict[str, Any], cls: type, names: Sequence[str]) -> dict[str, Any]:
    known = set(names)
    if given.keys() <= known:
        return given
    made = {}
    for name, value in given.items():
        if name in known:
            made[name] = value
            continue
        for each in options_of(cls):
            said = each.said
            if name in said.was or f"no_{name}" in said.was:
                if each.name in given:
                    raise OptionError(f"{what}: {name} is {each.name}, which is given too")
                made[each.name] = value if name in said.was else not value
                text = f"{what}: {name} is now {each.name}, and goes with the next version"
                warnings.warn(text, DeprecationWarning, stacklevel=4)
                break
            if name in said.like:
                raise OptionError(f"{what} has no option {name!r}; did you mean {each.name!r}?")
        else:
            raise OptionError(f"{what} has no option {name!r}{hint(name, names)}")
    return made


def _described(text: str | None, cls: type) -> str:
    """A docstring with a description of every option of a class among its arguments."""
    head, raises, tail = inspect.cleandoc(text or "").partition("\n\nRaises:")
    head += "" if "\nArgs:" in head else "\n\nArgs:"
    for each in options_of(cls):
        said = f"{each.name}: {each.described(NAMES)}."
        head += "\n" + textwrap.fill(said, 96, initial_indent=" " * 4, subsequent_indent=" " * 8)
    return head + raises + tail
