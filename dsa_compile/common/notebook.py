"""HTML for notebooks: tables and differences, everything escaped and of bounded length."""

import difflib
from collections.abc import Iterable, Sequence
from html import escape

MOST_LINES = 200
MOST_CELL = 200  # characters
_COLOURS = {"+": "#1a7f37", "-": "#cf222e", "@": "#6e7781"}


def table_html(title: str, heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table; texts are aligned to the left, numbers to the right."""
    head = "".join(f"<th>{_escaped(name)}</th>" for name in heads)
    shown = list(rows)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in shown[:MOST_LINES])
    return (
        f"<div><b>{_escaped(title)}</b><table><thead><tr>{head}</tr></thead>"
        f"<tbody>{body}</tbody></table>{_more(len(shown))}</div>"
    )


def diff_html(title: str, before: str, after: str) -> str:
    """Differences between two texts, line by line."""
    lines = difflib.unified_diff(
        before.splitlines(), after.splitlines(), n=2, lineterm="", fromfile="", tofile=""
    )
    return lines_html(title, list(lines)[2:])


def lines_html(title: str, lines: Sequence[str]) -> str:
    """Lines of a difference: ``+`` and ``-`` in colour."""
    shown = "\n".join(map(_line, lines[:MOST_LINES]))
    return (
        f"<div><b>{_escaped(title)}</b>"
        f'<pre style="line-height:1.3;overflow-x:auto">{shown}</pre>{_more(len(lines))}</div>'
    )


def _line(text: str) -> str:
    colour = _COLOURS.get(text[:1])
    return f'<span style="color:{colour}">{escape(text)}</span>' if colour else escape(text)


def _cell(value: object) -> str:
    side = "right" if isinstance(value, int | float) else "left"
    return f'<td style="text-align:{side}">{_escaped("" if value is None else str(value))}</td>'


def _escaped(text: str) -> str:
    return escape(text if len(text) <= MOST_CELL else text[: MOST_CELL - 1] + "…")


def _more(count: int) -> str:
    return f"<i>and {count - MOST_LINES} more</i>" if count > MOST_LINES else ""
