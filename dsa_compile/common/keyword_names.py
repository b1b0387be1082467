"""Keyword arguments that nothing takes, refused with the name that was probably meant."""

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from typing import Any, TypeVar

from dsa_compile.common.names import hint
from dsa_compile.errors import OptionError

T = TypeVar("T", bound=Callable[..., Any])


def unknown_name(
    what: str, name: str, names: Iterable[str], others: Mapping[str, str]
) -> OptionError:
    """The error about an option that does not exist.

    Args:
        what: that was called.
        name: that was given.
        names: of the options that there are.
        others: names of other engines' options, with ours.
    """
    meant = f"; did you mean {others[name]!r}?" if name in others else hint(name, names)
    return OptionError(f"{what} has no option {name!r}{meant}")


def suggests_names(
    others: Mapping[str, str] | None = None, name: str | None = None
) -> Callable[[T], T]:
    """A decorator of functions and classes: an unknown keyword raises :class:`OptionError`.

    The signature stays what it is. Use it below ``classmethod`` and above ``dataclass``.

    Args:
        others: names of other engines' options, with ours.
        name: users call the function by; None is its own.
    """

    def decorate(target: T) -> T:
        function: Callable[..., Any] = target
        what = target.__name__
        if isinstance(target, type):
            function = target.__init__  # type: ignore[misc]
        else:
            what = target.__qualname__
        what = name or what
        names = [p for p in inspect.signature(function).parameters if p not in ("self", "cls")]
        known = frozenset(names)

        @functools.wraps(function)
        def checked(*args: Any, **options: Any) -> Any:
            for option in options:
                if option not in known:
                    raise unknown_name(f"{what}()", option, names, others or {})
            return function(*args, **options)

        if isinstance(target, type):
            target.__init__ = checked  # type: ignore[misc]
            return target
        return checked  # type: ignore[return-value]

    return decorate


def changed_fields(instance: Any) -> list[tuple[str, Any]]:
    """Names and values of a dataclass instance's fields that are not at their defaults."""
    return [
        (each.name, getattr(instance, each.name))
        for each in fields(instance)
        if getattr(instance, each.name) != each.default
    ]
