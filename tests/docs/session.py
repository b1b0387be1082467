"""A page as one session: its commands and programs run one after the other in a directory."""

import contextlib
import io
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.docs.blocks import Block
from tests.docs.commands import ROOT, SCRIPTS, ours, run

# What a reader has who stands in the repository.
LINKED = ("examples", "benchmarks", "docs", "tests", "Makefile", "passes")


@dataclass(frozen=True)
class Ran:
    """A command or a program that ran.

    Attributes:
        block: that holds it.
        command: it, for messages.
        shown: what the page shows of its output; None where it shows nothing.
        line: of the page, where that begins.
        printed: its output.
        status: its exit status.
    """

    block: Block
    command: str
    shown: str | None
    line: int
    printed: str
    status: int


class Session:
    """The state that the blocks of one page share: a directory, and Python's names."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._names: dict[str, object] = {"__name__": "__main__"}
        self._fresh = False  # whether commands need a process of their own
        for name in LINKED:
            (directory / name).symlink_to(ROOT / name)
        self._environment = _environment(directory)

    def run(self, block: Block, output: Block | None) -> list[Ran]:
        """Run a block; ``output`` is what the page shows of what a program prints."""
        with contextlib.chdir(self.directory), _patched(self._environment):
            if block.language == "python":
                shown = None if output is None else output.text
                at = output or block
                return [Ran(at, "the program", shown, at.line, self._program(block), 0)]
            return [
                Ran(block, command, shown, line, *self._command(command))
                for command, shown, line in _commands(block)
            ]

    def write(self, block: Block) -> None:
        """Put a block's text into the file that its comment names."""
        path = self.directory / block.directives["write"]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(block.text, encoding="utf-8")

    def files(self, pattern: str) -> Iterator[str]:
        """Texts of the files of a pattern."""
        return (path.read_text(encoding="utf-8") for path in self.directory.glob(pattern))

    def _program(self, block: Block) -> str:
        printed = io.StringIO()
        # lines of a traceback are those of the page
        code = compile("\n" * (block.line - 1) + block.text, str(ROOT / block.page), "exec")
        with contextlib.redirect_stdout(printed):
            exec(code, self._names)
        return printed.getvalue()

    def _command(self, command: str) -> tuple[str, int]:
        if not self._fresh and (words := ours(command)) is not None:
            status, printed = run(words)
            return printed, status
        # what is installed, and another checkout, are for new processes alone
        self._fresh = self._fresh or command.startswith(("cd ", "pip install"))
        if command.startswith("cd "):
            self.directory /= command.removeprefix("cd ")
            os.chdir(self.directory)
            return "", 0
        done = subprocess.run(
            ["bash", "-c", command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        return done.stdout, done.returncode


def _commands(block: Block) -> Iterator[tuple[str, str | None, int]]:
    """Each command of a block, what a ``console`` shows of its output, and at which line."""
    lines = block.text.splitlines()
    starts = [i for i, line in enumerate(lines) if block.language == "sh" or line.startswith("$ ")]
    assert starts[:1] == [0], f"{block.where}: a console starts with a command behind '$ '"
    done = 0
    for start, stop in zip(starts, [*starts[1:], len(lines)], strict=True):
        if start < done:
            continue
        done = start + 1
        while lines[done - 1].endswith("\\"):
            done += 1
        words = (line.removesuffix("\\").strip() for line in lines[start:done])
        command = " ".join(words).removeprefix("$ ")
        if command and not command.startswith("#"):
            shown = "".join(f"{line}\n" for line in lines[done:stop]) or None
            yield command, shown, block.line + done


def _environment(directory: Path) -> dict[str, str]:
    """Variables under which commands print alike everywhere and install nothing elsewhere."""
    programs, site = directory / ".bin", directory / ".site"
    programs.mkdir()
    for name, target in SCRIPTS.items():
        module, _, function = target.partition(":")
        script = f"import sys; from {module} import {function}; sys.exit({function}())"
        (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" -c "{script}" "$@"\n')
        (programs / name).chmod(0o755)
    (programs / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (programs / "pip").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m pip "$@"\n')
    for name in ("python", "pip"):
        (programs / name).chmod(0o755)
    return {
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": f"{site}{os.pathsep}{ROOT}",
        "PIP_TARGET": str(site),
        "PIP_NO_INDEX": "1",
        "PIP_NO_DEPS": "1",
        "PIP_NO_BUILD_ISOLATION": "0",  # pip's spelling of "without it"
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "COLUMNS": "100",
        "NO_COLOR": "1",
        "OMP_NUM_THREADS": "1",
        "PYTEST_ADDOPTS": "",
    }


@contextlib.contextmanager
def _patched(environment: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(environment)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
