"""Completion of options and names in bash, zsh and fish, by argcomplete where it is installed."""

import argparse
import os
import sys
from collections.abc import Callable, Iterable
from typing import Any

from dsa_compile.errors import UserError

HELP = """\
completion of options and names in the shell (pip install argcomplete):
  bash, zsh   eval "$(register-python-argcomplete {program})"
  fish        register-python-argcomplete --shell fish {program} | source
"""


def is_completing() -> bool:
    """Whether a shell asks for completions, and not a person for the command."""
    return "_ARGCOMPLETE" in os.environ


def complete(parser: argparse.ArgumentParser) -> None:
    """Answer a shell that asks for completions, and exit."""
    try:
        import argcomplete
    except ImportError:
        sys.exit(1)
    argcomplete.autocomplete(parser)


def completed_by(
    action: argparse.Action, names: Callable[[argparse.Namespace], Iterable[str]]
) -> None:
    """Complete an argument with names made when a shell asks for them.

    Args:
        action: the argument.
        names: takes what was parsed so far; completes nothing where it raises a UserError.
    """

    def completer(parsed_args: argparse.Namespace, **rest: Any) -> list[str]:
        try:
            return list(names(parsed_args))
        except UserError:
            return []

    action.completer = completer  # type: ignore[attr-defined]
