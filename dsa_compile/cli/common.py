"""Parsing, refusals and output streams that the commands share."""

import argparse
import errno
import io
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from dsa_compile.cli.completion import HELP, complete, is_completing
from dsa_compile.common.names import nearest
from dsa_compile.errors import FLAGS, OptionValueError, UserError
from dsa_compile.version import __version__


class _Formatter(argparse.HelpFormatter):
    """Wraps a text of one line, and leaves a text with line breaks as it is."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if "\n" in text.strip():
            return "".join(indent + line for line in text.splitlines(keepends=True))
        return super()._fill_text(text, width, indent)


class SubParser(argparse.ArgumentParser):
    """A parser whose complaints are :class:`UserError` and name what was probably meant."""

    def __init__(self, *args: Any, **options: Any) -> None:
        options.setdefault("formatter_class", _Formatter)
        self._given: list[str] = []
        super().__init__(*args, **options)

    def error(self, message: str) -> NoReturn:
        """Refuse the command line."""
        if message.endswith("required"):  # argparse says so before it says what it does not know
            message += self._meant(text for text in self._given if not self._takes(text))
        more = "" if message.endswith("?") else f"; see {self.prog} --help"
        raise UserError(message + more)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse, and refuse what is not known."""
        self._given = sys.argv[1:] if args is None else list(args)
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}{self._meant(unknown)}")
        return parsed, unknown

    def _takes(self, text: str) -> bool:
        name = text.partition("=")[0]
        return any(known.startswith(name) for known in self._option_string_actions)

    def _meant(self, unknown: Iterable[str]) -> str:
        # dashes are no likeness
        options = [text.partition("=")[0].strip("-") for text in unknown if text.startswith("-")]
        shown = [a for a in self._actions if a.help != argparse.SUPPRESS]
        known = {name.strip("-"): name for action in shown for name in action.option_strings}
        files = [text for text in unknown if text.endswith(".json")]
        if files and "output" in known:
            return f"; did you mean -o {files[0]}?"
        meant = [known[near] for option in options if (near := nearest(option, known))]
        return f"; did you mean {meant[0]}?" if meant else ""

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        known = [str(choice) for choice in action.choices]
        near = nearest(str(value), known)
        meant = f"did you mean {near}?" if near else f"choose from {', '.join(known)}"
        what = "command" if isinstance(action, argparse._SubParsersAction) else "value"
        raise argparse.ArgumentError(
            None if what == "command" else action, f"unknown {what} {value!r}: {meant}"
        )


class Parser(SubParser):
    """The parser of a command: also has ``--version``, and completes in shells."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.add_argument(
            "--version", action="version", version=f"{self.prog} {__version__}",
            help="print the version and exit",
        )  # fmt: skip
        completion = HELP.format(program=self.prog)
        self.epilog = "\n".join(text for text in (self.epilog, completion) if text)

    def add_subparsers(self, **options: Any) -> Any:
        """Add subparsers as argparse does; they share the refusals, not ``--version``."""
        return super().add_subparsers(**{"parser_class": SubParser, **options})

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        """Parse; where a shell asks for completions, print those and exit."""
        if is_completing():
            complete(self)
        return super().parse_args(args, namespace)


def numbers(text: str) -> tuple[int, ...]:
    """``1,16,8K``, as an argument's type; K stands for 1,024."""
    try:
        return tuple(_number(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers") from None


def number(text: str) -> int:
    """``8192`` or ``8K``, as an argument's type."""
    try:
        return _number(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number such as 8192 or 8K") from None


def _number(text: str) -> int:
    return int(text[:-1]) * 1024 if text[-1:] in ("k", "K") else int(text)


def complain(program: str, message: str) -> None:
    """Print an error as one line on standard error, whatever a path or a reason contains."""
    print(f"{program}: error: {printable(' '.join(message.split()))}", file=sys.stderr)


def printable(text: str) -> str:
    """The text with what a terminal would obey, or UTF-8 cannot hold, written as ``\\x1b``."""
    return "".join(
        char if char.isprintable() or char in "\n\t" else ascii(char)[1:-1] for char in text
    )


@contextmanager
def log_to_stderr(name: str) -> Iterator[None]:
    """Print what a logger and those below it log from level INFO on, a line each, meanwhile."""
    logger, handler = logging.getLogger(name), logging.StreamHandler(sys.stderr)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)


def wait_passively() -> None:
    """Let idle OpenMP threads sleep; to be called before torch is imported.

    They spin by default. Where two share a core, as on busy or virtual machines, each parallel
    region then lasts a scheduler's time slice (4 ms): small models were seen to run 15 times
    slower. Sleeping costs a few microseconds a region. A user's own setting is left alone.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def print_replacing() -> None:
    """Print ``?`` for what the encoding of standard output lacks, instead of failing there."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def guarded(program: str, run: Callable[[], int], interrupted: str = "interrupted") -> int:
    """Run a command and turn how it ends into an exit status.

    Returns:
        What ``run`` returns; 2 for a :class:`UserError` or a full disk, 130 when interrupted (all
        with one line on standard error), 0 when the reader of our output left.
    """
    print_replacing()
    wait_passively()
    try:
        try:
            status = run()
        except SystemExit:  # of --help
            sys.stdout.flush()
            raise
        sys.stdout.flush()
        return status
    except UserError as error:
        spelt = error.spelt(FLAGS) if isinstance(error, OptionValueError) else str(error)
        complain(program, spelt)
        return 2
    except KeyboardInterrupt:
        complain(program, interrupted)
        return 130
    except BrokenPipeError:
        # as `| head` does, which has what it wants; keep Python from complaining at exit
        _silence_stdout()
        return 0
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        complain(program, f"cannot write: {error.strerror}")
        _silence_stdout()
        return 2


def _silence_stdout() -> None:
    """Send what is still to be written nowhere: Python would complain of it at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
