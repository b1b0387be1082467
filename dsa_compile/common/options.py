"""Options: a field of a dataclass says once what the API, the commands and the pages say of it.

::

    @has_options
    @dataclass(frozen=True, kw_only=True)
    class Limits:
        rows: int = option(8, "most requests of a step", unit="requests", least=1)

        def __post_init__(self) -> None:
            check(self)

Its name is the keyword, and with dashes the flag. :mod:`dsa_compile.cli.flags` makes arguments of
commands from it, keywords of functions :mod:`dsa_compile.common.option_keywords`.
"""

import functools
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, Field, dataclass, field, fields
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin

from dsa_compile.common.names import hint
from dsa_compile.errors import OptionValueError

T = TypeVar("T")
_NOUNS = {int: "an integer", float: "a number", str: "a text", bool: "True or False"}
_SEVERAL = {int: "integers", float: "numbers", str: "texts"}


@dataclass(frozen=True)
class Option:
    """What an option is, beside its name, type and default.

    Attributes:
        help: what it says or does; ``{name}`` stands for another option.
        unset: what the default stands for, where that is not what it says.
        unit: of its values.
        choices: the values that it may have.
        least: bound of a number, or of each of several.
        most: likewise.
        above: ``least`` itself is out of bounds.
        metavar: what stands for a value in a command's help, where a unit or choices do not.
        flag: of the commands, where that is not the name.
        also: further flags of the commands.
        was: names that it had, taken for one more version; ``no_x`` where ``x`` meant the opposite.
        like: names that it has in other libraries, for which its own is suggested.
        several: how a command takes many values: ``a,b``, or ``a b``, or a flag for each.
        parse: makes a value of a text, where the type does not say how; raises UserError.
    """

    help: str
    _: KW_ONLY
    unset: str = ""
    unit: str = ""
    choices: tuple[object, ...] = ()
    least: float = -math.inf
    most: float = math.inf
    above: bool = False
    metavar: str = ""
    flag: str = ""
    also: tuple[str, ...] = ()
    was: tuple[str, ...] = ()
    like: tuple[str, ...] = ()
    several: Literal["commas", "words", "flags"] = "flags"
    parse: Callable[[str], Any] | None = None

    @property
    def bounds(self) -> str:
        """``">= 1"``, ``"in (0, 1]"``, or nothing."""
        if math.isinf(self.least):
            return ""
        low, high = (x if isinstance(x, int) else f"{x:g}" for x in (self.least, self.most))
        if math.isinf(self.most):
            return f"{'>' if self.above else '>='} {low}"
        return f"in {'(' if self.above else '['}{low}, {high}]"


def option(default: T, help: str, *, hash: bool | None = None, repr: bool = True, **said: Any) -> T:
    """A field of a dataclass that is an option.

    Args:
        default: of the field.
        help: see :class:`Option`, as of the others.
        hash: see :func:`dataclasses.field`.
        repr: likewise.
        **said: attributes of :class:`Option`.
    """
    metadata = {"option": Option(help, **said)}
    return field(default=default, metadata=metadata, hash=hash, repr=repr)


@dataclass(frozen=True)
class Named:
    """An option of a class: its name, default, and what its field says.

    Attributes:
        name: of the field.
        default: of the field.
        kind: type of its values, or of each where there are ``many``.
        many: whether it is a sequence.
        optional: whether it may be None.
        said: by its field.
    """

    name: str
    default: Any
    kind: Any
    many: bool
    optional: bool
    said: Option

    def shown_default(self) -> str:
        """What holds where the option is not given; empty where that is none."""
        if self.said.unset or self.default is None or self.default == ():
            return self.said.unset
        return ("on" if self.default else "off") if self.kind is bool else f"{self.default}"

    def described(self, names: Mapping[str, str]) -> str:
        """Its help, with its default, unit and bounds.

        Args:
            names: how options are called.
        """
        facts = (f"default: {self.shown_default()}" * bool(self.shown_default()), self.said.bounds)
        more = "; ".join(fact for fact in facts if fact)
        return (self.said.help + (f" ({more})" if more else "")).format_map(names)

    def wanted(self) -> str:
        """What its values must be."""
        if self.kind is bool:
            return _NOUNS[bool]
        unit = f" of {self.said.unit}" if self.kind is float and self.said.unit else ""
        finite = "finite and " if self.kind is float and math.isinf(self.said.most) else ""
        bounds = f" {finite}{self.said.bounds}" if self.said.bounds else ""
        several = f"a tuple of {_SEVERAL[self.kind]}" if self.many else _NOUNS[self.kind]
        return f"{several}{unit}{bounds}"

    def takes(self, value: object) -> bool:
        """Whether a value has the type and is within the bounds."""
        if value is None:
            return self.optional
        if self.many:
            return isinstance(value, tuple) and all(map(self._takes, value))
        return self._takes(value)

    def _takes(self, value: Any) -> bool:
        if self.kind is str:
            return isinstance(value, str | os.PathLike)
        if isinstance(value, bool) or self.kind is bool:
            return isinstance(value, bool) and self.kind is bool
        if not isinstance(value, int | float if self.kind is float else int):
            return False
        low, high = self.said.least, self.said.most
        finite = self.kind is int or abs(value) <= sys.float_info.max
        return finite and low <= value <= high and not (self.said.above and value == low)


@functools.cache
def options_of(cls: type) -> tuple[Named, ...]:
    """The options among a dataclass's fields, in order."""
    return tuple(_named(each) for each in fields(cls) if "option" in each.metadata)


def _named(each: "Field[Any]") -> Named:
    parts = get_args(each.type) if isinstance(each.type, UnionType) else (each.type,)
    kinds = [part for part in parts if part is not NoneType]
    sequences = [part for part in kinds if get_origin(part) in (tuple, Sequence)]
    kind = get_args(sequences[0])[0] if sequences else kinds[0]
    many, optional = bool(sequences), NoneType in parts
    return Named(each.name, each.default, kind, many, optional, each.metadata["option"])


def faults(options: Any) -> Iterator[tuple[str, str, object]]:
    """Options with a value of a wrong type or out of bounds: the name, what is wanted, the value.

    Before that, lists become tuples.

    Args:
        options: an instance of a frozen dataclass.
    """
    for each in options_of(options.__class__):
        value = getattr(options, each.name)
        if each.many and isinstance(value, list):
            object.__setattr__(options, each.name, value := tuple(value))
        if each.kind in _NOUNS and not each.said.choices and not each.takes(value):
            yield each.name, each.wanted(), value


def check(options: Any) -> None:
    """Refuse an option that has a wrong value; lists become tuples.

    Raises:
        OptionValueError: names the option and what it may be.
    """
    for each in options_of(options.__class__):
        value, choices = getattr(options, each.name), each.said.choices
        if each.many and isinstance(value, str):
            name = f"{{{each.name}}}"
            raise OptionValueError(f"{name}={{0!r}} should be a list, such as [{{0!r}}]", value)
        if choices and value not in choices and not (value is None and each.optional):
            what = f"unknown {each.name.replace('_', ' ')}"
            names = [str(choice) for choice in choices]
            raise OptionValueError(what + " {!r}{}", value, hint(str(value), names))
    for name, wanted, value in faults(options):
        raise OptionValueError(f"{{{name}}} must be {wanted}; got {{!r}}", value)


def changed_fields(instance: Any) -> list[tuple[str, Any]]:
    """Names and values of a dataclass instance's fields that are not at their defaults."""
    return [
        (each.name, getattr(instance, each.name))
        for each in fields(instance)
        if getattr(instance, each.name) != each.default
    ]
