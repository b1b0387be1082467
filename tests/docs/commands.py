"""The commands of the package: run in this process, or parsed alone."""

import argparse
import contextlib
import importlib
import io
import re
import shlex
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS: dict[str, str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
_OPERATORS = re.compile(r"[|&;<>$`*]")


def entry(name: str) -> Callable[[], int]:
    """The function behind a command such as ``dsa-compile``."""
    module, _, function = SCRIPTS[name].partition(":")
    return getattr(importlib.import_module(module), function)


def parser(name: str) -> argparse.ArgumentParser:
    """The parser that a command takes its arguments with."""
    made: list[argparse.ArgumentParser] = []

    def parse(self: argparse.ArgumentParser, *_: object, **__: object) -> None:
        made.append(self)
        raise _ParsedError

    patched = mock.patch.object(argparse.ArgumentParser, "parse_args", parse)
    with patched, contextlib.suppress(_ParsedError):
        run([name])
    return made[0]


def ours(line: str) -> list[str] | None:
    """The words of a line that is one of our commands and nothing else, or None."""
    words = shlex.split(line, comments=True)
    plain = words and words[0] in SCRIPTS and not any(map(_OPERATORS.search, _unquoted(line)))
    return words if plain else None


def run(words: Sequence[str]) -> tuple[int, str]:
    """Exit status, and what was printed on standard output and error, of one of our commands."""
    printed = io.StringIO()
    with (
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(printed),
        mock.patch.object(sys, "argv", list(words)),
    ):
        try:
            status = entry(words[0])()
        except SystemExit as left:  # --help, --version
            status = left.code if isinstance(left.code, int) else 1
    return status, printed.getvalue()


class _ParsedError(Exception):
    """Leaves a command once its arguments have been taken."""


def parses(words: Sequence[str]) -> str | None:
    """Refusal of a command's arguments, or None; the command is not run."""
    original = argparse.ArgumentParser.parse_args

    def parse(self: argparse.ArgumentParser, *args: object, **kwargs: object) -> None:
        original(self, *args, **kwargs)  # type: ignore[call-overload]
        raise _ParsedError

    with mock.patch.object(argparse.ArgumentParser, "parse_args", parse):
        try:
            _, printed = run(words)
        except _ParsedError:
            return None
    return None if {"-h", "--help", "--version"} & set(words) else printed


def options(made: argparse.ArgumentParser) -> set[str]:
    """Options of a command and of the commands below it."""
    found = set(made._option_string_actions)
    for action in made._actions:
        if isinstance(action, argparse._SubParsersAction):
            found.update(*map(options, action.choices.values()))
    return found


def calls(script: str) -> Iterator[list[str]]:
    """Calls of our commands in shell lines, however they are joined."""
    for line in script.splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, ";"]:
            if word and set(word) <= set("|&;<>"):
                if words and words[0] in SCRIPTS:
                    yield words
                words = words if word.startswith((">", "<")) else []
                continue
            words.append(word)


def _unquoted(line: str) -> list[str]:
    return re.sub(r"'[^']*'|\"[^\"$`]*\"", "", line).split()
