"""Names that a user gives: the one that was meant, where one is not known."""

import difflib
from collections.abc import Iterable

from dsa_compile.errors import UserError


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name nearest to one that is not known, or None if none is near."""
    lower = {each.lower(): each for each in reversed(list(known))}
    begun = [each for each in lower if len(name) >= 3 and each.startswith(name.lower())]
    if len(begun) == 1:
        return lower[begun[0]]
    close = difflib.get_close_matches(name.lower(), lower, n=1)
    return lower[close[0]] if close else None


def hint(name: str, known: Iterable[str], what: str = "choose one of") -> str:
    """``"; did you mean 'fp8'?"``, or all known names where none is near."""
    names = [str(each) for each in known]
    if near := nearest(name, names):
        return f"; did you mean {near!r}?"
    return f"; {what} {', '.join(names)}" if names else ""


def one_of(what: str, name: str, known: Iterable[str], listed_by: str = "") -> None:
    """Refuse a name that is not known.

    Args:
        what: is named.
        name: as given.
        known: all that there are.
        listed_by: the command that prints them, where they are too many for a line.

    Raises:
        UserError: names the nearest, or all.
    """
    names = tuple(known)
    if name in names:
        return
    if listed_by and nearest(name, names) is None:
        raise UserError(f"unknown {what} {name!r}; {listed_by} prints them all")
    raise UserError(f"unknown {what} {name!r}{hint(name, names)}")
