"""Output of ``dsa-inspect``: tables and code in colour in a terminal, plain elsewhere, or JSON."""

import textwrap
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from dsa_compile.cli.tables import console, print_json, table
from dsa_compile.inspect.store import ranges
from dsa_compile.ir.listing import Statement

__all__ = ["console", "lines", "of_layers", "print_json", "statement", "styled", "table"]
_LABEL = 12


def styled(text: str, style: str = "") -> Text:
    """Text printed as it is: brackets in it are no markup."""
    return Text(text, style=style)


def statement(line: Statement) -> Text:
    """A line of a graph: its code, then dimmed its type and module."""
    note = "  ".join(part for part in (line.type, line.module) if part)
    made = Text(line.code)
    return made.append(f"  # {note}", style="dim") if note else made


def of_layers(numbers: Sequence[int]) -> str:
    """``61 layers (0-60)``."""
    return f"{len(numbers)} layer{'s' * (len(numbers) != 1)} ({ranges(numbers)})"


def lines(out: Console, label: str, text: str, style: str = "", folded: bool = True) -> None:
    """Print a label and a text in a column of its own.

    Args:
        out: where to.
        label: of at most eleven letters.
        text: folded between words where the line is full.
        style: of both.
        folded: False for a command, which can then be copied.
    """
    width = max(out.width - _LABEL, 20)
    parts = textwrap.wrap(text, width, break_long_words=False) if folded else [text]
    for part in parts or [""]:
        out.print(styled(f"{label:{_LABEL}}{part}", style))
        label = ""
