"""What both commands share: how they refuse, and what they print to."""

import argparse
import io
import sys
from typing import NoReturn

from dsa_compile.errors import UserError


class Parser(argparse.ArgumentParser):
    """A parser whose complaints are :class:`UserError`, so that they are one line as all others."""

    def error(self, message: str) -> NoReturn:
        """Refuse the command line."""
        raise UserError(f"{message}; see {self.prog} --help")


def complain(program: str, message: str) -> None:
    """Print an error as one line on standard error, whatever a path or a reason contains."""
    print(f"{program}: error: {' '.join(message.split())}", file=sys.stderr)


def print_replacing() -> None:
    """Print ``?`` for what the encoding of standard output lacks, instead of failing there."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
