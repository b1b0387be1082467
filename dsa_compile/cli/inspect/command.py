"""``dsa-inspect``: what the passes did to a program, from the records in its artifact."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from dsa_compile.cli.common import Parser, guarded
from dsa_compile.cli.completion import completed_by
from dsa_compile.cli.inspect import (
    bisect,
    compare,
    diff,
    draft,
    graph,
    html,
    near_miss,
    onnx,
    passes,
    ranks,
    time,
    verify,
    why,
)

PROGRAM = "dsa-inspect"

_DESCRIPTION = """\
Show what the passes of dsa-compile did to a program, from the records in its
artifact.

Without a command: the passes, with their rewrites, promises, node counts and
times. The command may also come first: dsa-inspect diff ARTIFACT PASS.
"""
_EPILOG = """\
examples:
  dsa-inspect artifact/
  dsa-inspect artifact/ diff recognize_swiglu --layer 3
  dsa-inspect artifact/ why experts
  dsa-inspect artifact/ graph --layer 5 --variant long
  dsa-inspect artifact/ compare yesterday/
  dsa-inspect artifact/ time --bench bench.json
  dsa-inspect artifact/ draft --prompt "import os"
  dsa-inspect artifact/ html -o report.html --open

Colour in a terminal (NO_COLOR switches it off), plain text when piped. --json
prints one JSON value and nothing else on standard output.
Exit status: 0 shown, 2 refused, 130 interrupted.
"""

# Each has register(commands), which adds its parser with a default ``run``: args -> exit status.
# They import what they need when they run: --help and plain answers wait for neither torch nor
# transformers.
COMMANDS: tuple[ModuleType, ...] = (
    diff,
    why,
    near_miss,
    graph,
    compare,
    time,
    ranks,
    html,
    onnx,
    verify,
    bisect,
    draft,
)


def build_parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    parser = Parser(
        prog=PROGRAM,
        description=_DESCRIPTION,
        epilog=_EPILOG,
    )
    parser.add_argument(
        "artifact", type=Path, metavar="ARTIFACT", help="directory written by dsa-compile"
    )
    parser.add_argument("--json", action="store_true", help="print data instead of text")
    passes.add_options(parser)
    parser.set_defaults(run=passes.run)
    commands = parser.add_subparsers(
        title="commands", metavar="COMMAND", prog=f"{PROGRAM} ARTIFACT"
    )
    for command in COMMANDS:
        command.register(commands)
    for made in commands.choices.values():
        made.add_argument(
            "--json", action="store_true", default=argparse.SUPPRESS, help="print data, not text"
        )
        for action in made._actions:
            if action.metavar == "PASS":
                completed_by(action, lambda args: _passes(args.artifact))
    return parser


def _passes(artifact: Path) -> list[str]:
    from dsa_compile.artifact.manifest import open_manifest

    return [summary.name for summary in open_manifest(artifact).passes]


def artifact_first(argv: Sequence[str]) -> list[str]:
    """Arguments with the artifact before the command, also where the command came first.

    A directory of a command's name is an artifact: ``dsa-inspect diff`` lists its passes.
    """
    names = {command.__name__.rpartition(".")[2].replace("_", "-") for command in COMMANDS}
    if not argv or argv[0] not in names or Path(argv[0]).is_dir():
        return list(argv)
    command, *rest = argv
    at = next((i for i, text in enumerate(rest) if Path(text).is_dir()), 0)
    return [*rest[at : at + 1], command, *rest[:at], *rest[at + 1 :]]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: arguments without the program's name; None takes the process's own.

    Returns:
        0 when the answer is printed, 2 for a user's error (one line on stderr), 130 when
        interrupted; a command may say more.
    """
    return guarded(PROGRAM, lambda: _run(argv))


def _run(argv: Sequence[str] | None) -> int:
    parser = build_parser()
    args = parser.parse_args(artifact_first(sys.argv[1:] if argv is None else argv))
    status: int = args.run(args)
    return status
