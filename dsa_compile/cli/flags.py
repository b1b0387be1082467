"""Flags of commands, made of the options of a class; see :mod:`dsa_compile.common.options`."""

import argparse
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from dsa_compile.cli.completion import completed_by
from dsa_compile.common.options import Named, options_of
from dsa_compile.errors import FLAGS, UserError

_UNITS = {"k": 10**3, "K": 1 << 10, "m": 10**6, "M": 1 << 20}


def add_options(
    group: Any,
    cls: type,
    *,
    only: Collection[str] = (),
    leave_out: Collection[str] = (),
    unset: Mapping[str, str] | None = None,
) -> dict[str, argparse.Action]:
    """Add a flag for each option of a class; what is not given is not in the namespace.

    Args:
        group: a parser or a group of its arguments.
        cls: a dataclass.
        only: names of options, to add no others.
        leave_out: names of options.
        unset: what holds where some are not given, in words, if that is not the class's default.

    Returns:
        The arguments by the options' names.
    """
    actions = {}
    for each in options_of(cls):
        if each.name not in leave_out and (not only or each.name in only):
            words = (unset or {}).get(each.name)
            if words is not None:
                each = replace(each, said=replace(each.said, unset=words))
            actions[each.name] = _add(group, each)
            actions[each.name].option = cls, each.name  # type: ignore[attr-defined]
    return actions


def given_options(cls: type, args: argparse.Namespace) -> dict[str, Any]:
    """The options of a class that a command was given, by their names."""
    given = {each.name: getattr(args, each.name) for each in options_of(cls) if each.name in args}
    return {n: tuple(v) if isinstance(v, list) else v for n, v in given.items()}


def _add(group: Any, each: Named) -> argparse.Action:
    said = each.said
    names = (said.flag or each.name, *said.also)
    how: dict[str, Any] = {"dest": each.name, "default": argparse.SUPPRESS}
    if each.kind is bool:
        how["action"] = _Switch
    else:
        how |= {"type": _parser(each), "metavar": _metavar(each)}
    if each.many and said.parse is None:
        how["action"] = "append" if said.several == "flags" else "extend"
        how |= {"nargs": "+"} if said.several == "words" else {}
    help = each.described(FLAGS).replace("%", "%%")
    action: argparse.Action = group.add_argument(*(FLAGS[n] for n in names), help=help, **how)
    if said.was:
        old = (FLAGS[name] for name in said.was)
        group.add_argument(*old, help=argparse.SUPPRESS, **how)
    if said.choices:
        completed_by(action, lambda args: map(str, said.choices))
    return action


class _Switch(argparse.Action):
    """Flags that turn something on, each with one that turns it off."""

    def __init__(self, option_strings: Sequence[str], dest: str, **how: Any) -> None:
        self._off = [opposite(flag) for flag in option_strings]
        super().__init__([*option_strings, *self._off], dest, nargs=0, **how)

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any,
        option_string: str | None = None,
    ) -> None:  # fmt: skip
        setattr(namespace, self.dest, option_string not in self._off)


def opposite(flag: str) -> str:
    """The flag that turns off what another turns on."""
    name = flag.removeprefix("--")
    return f"--{name.removeprefix('no-')}" if name.startswith("no-") else f"--no-{name}"


def _parser(each: Named) -> Callable[[str], Any]:
    kinds: dict[type, Callable[[str], Any]] = {int: whole_number, float: float}
    one = _refusing(each.said.parse) if each.said.parse else kinds.get(each.kind, each.kind)
    if each.many and each.said.several == "commas":
        return lambda text: [one(part.strip()) for part in text.split(",") if part.strip()]
    return one


def _refusing(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    def parsed(text: str) -> Any:
        try:
            return parse(text)
        except UserError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parsed


def whole_number(text: str) -> int:
    """A number such as 4096, 4K (of 1024) or 4k (of 1000), as vLLM reads it."""
    unit = _UNITS.get(text[-1:], 1)
    digits = text if unit == 1 else text[:-1]
    if not re.fullmatch(r"\d+(\.\d+)?" if unit > 1 else r"-?\d+", digits):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number such as 4096, 4K or 4k")
    return int(float(digits) * unit) if unit > 1 else int(digits)


def _metavar(each: Named) -> str:
    said = each.said
    if said.choices:
        return f"{{{','.join(map(str, said.choices))}}}"
    many = ",..." if each.many and said.several == "commas" else ""
    kinds = {int: "N", float: "X"}
    return (said.metavar or said.unit.upper() or kinds.get(each.kind, "TEXT")) + many
