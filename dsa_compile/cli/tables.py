"""Output of the commands: tables that fit a terminal, plain text elsewhere, or JSON."""

import copy
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Column, Table

_PLAIN_WIDTH = 160
_LEAST_WIDTH = 60  # a narrower terminal wraps lines, which is better than names cut short


class _Console(Console):
    """Leaves a reader who has left, as ``head`` does, to the command: nothing is wrong."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def console(stderr: bool = False) -> Console:
    """Console on standard output, or on standard error.

    In a terminal tables are as wide as that, or as COLUMNS says. Elsewhere they are as wide as they
    need to be, lines keep their length, and nothing has a colour. NO_COLOR is honoured.
    """
    made = _Console(stderr=stderr, highlight=False, soft_wrap=True)
    if not made.is_terminal and "COLUMNS" not in os.environ:
        made.width = _PLAIN_WIDTH
    made.width = max(made.width, _LEAST_WIDTH)
    return made


def table(*columns: str, right: tuple[str, ...] = (), gap: int = 2, line: bool = False) -> Table:
    """A table without lines, or with one below the heads.

    Texts of a table that is too wide are folded; numbers never lose a digit.

    Args:
        columns: the heads; a line break in one makes its column narrower.
        right: those that hold numbers, aligned to the right.
        gap: blanks between columns, where there is no line.
        line: draw one below the heads.
    """
    if line:
        made = Table(box=box.SIMPLE_HEAD)
    else:
        made = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="bold")
    for column in columns:
        if column in right:
            made.add_column(column, justify="right", no_wrap=True)
        else:
            made.add_column(column, overflow="fold")
    return made


def fits(out: Console, shown: Table) -> bool:
    """Whether a table fits without folding."""
    options = out.options.update(width=10_000)
    return Measurement.get(out, options, shown).maximum <= out.width


def show(out: Console, shown: Table) -> None:
    """Print a table; one with too many numbers to a row as several, one below the other.

    Each part repeats the texts with which rows begin.
    """
    parts = [shown] if fits(out, shown) else list(_parts(out, shown))
    for part in parts:
        out.print(part)


def _parts(out: Console, shown: Table) -> Iterator[Table]:
    columns = shown.columns
    first = next((i for i, c in enumerate(columns) if c.justify == "right"), len(columns))
    chosen = list(columns[:first])
    for column in columns[first:]:
        if len(chosen) > first and not fits(out, _with(shown, [*chosen, column])):
            yield _with(shown, chosen)
            chosen = list(columns[:first])
        chosen.append(column)
    yield _with(shown, chosen)


def _with(shown: Table, columns: Sequence[Column]) -> Table:
    part = copy.copy(shown)
    part.columns = [replace(column, _index=index) for index, column in enumerate(columns)]
    return part


def print_json(data: Any) -> None:
    """Print data as indented JSON on standard output."""
    json.dump(data, sys.stdout, indent=1, ensure_ascii=False, allow_nan=False)
    sys.stdout.write("\n")
