"""Tables of the pages, made from kept figures: ``python -m tests.docs.tables [PAGE…]``.

A table stands between two comments::

    <!-- table: results/kernels_h200.json cases op=experts_fp8 -->
    <!-- end -->

The first names a file below ``docs``, or several by ``*``, then what is made of it and how: a
function of :data:`KINDS` with its arguments. What stands between the comments is the function's
result. Where there is no such file yet, it stays as it was written.
"""

import json
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.docs import kernel_tables, step_tables
from tests.docs.commands import ROOT
from tests.docs.pages import PAGES

KINDS: Mapping[str, Callable[..., list[str]]] = {
    "run": kernel_tables.run,
    "cases": kernel_tables.cases,
    "grid": kernel_tables.grid,
    "beside": kernel_tables.beside,
    "families": kernel_tables.families,
    "highlights": kernel_tables.highlights,
    "steps": step_tables.steps,
    "ops": step_tables.ops,
    "ablation": step_tables.ablation,
    "mixed": step_tables.mixed,
}
"""By name; each takes the content of a file and the comment's arguments, and returns lines."""

_TABLE = re.compile(
    r"^<!-- table: (?P<pattern>\S+) (?P<kind>\S+) ?(?P<arguments>[^\n]*?) ?-->\n"
    r"(?P<text>.*?)^<!-- end -->$",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True)
class Marked:
    """A table as the page has it.

    Attributes:
        pattern: of files below ``docs``.
        kind: a key of :data:`KINDS`.
        arguments: for that function.
        text: between the comments.
    """

    pattern: str
    kind: str
    arguments: Mapping[str, str]
    text: str

    @property
    def kept(self) -> bool:
        """Whether a file has its figures."""
        return any((ROOT / "docs").glob(self.pattern))

    def made(self) -> str:
        """Table as its file's figures make it."""
        return "\n".join([*KINDS[self.kind](read(self.pattern), **self.arguments), ""])


def marked(text: str) -> list[Marked]:
    """Every table of a page's text."""
    return [_marked(match) for match in _TABLE.finditer(text)]


def filled(text: str) -> str:
    """A page's text with every table whose figures are kept made anew."""

    def replaced(match: re.Match[str]) -> str:
        table = _marked(match)
        if not table.kept:
            return match[0]
        start, stop = (place - match.start() for place in match.span("text"))
        return match[0][:start] + table.made() + match[0][stop:]

    return _TABLE.sub(replaced, text)


def read(pattern: str) -> dict[str, Any]:
    """Content of all files: cases and rows one after another, and the head of each in ``runs``.

    Raises:
        ValueError: two files have the same case.
    """
    merged: dict[str, Any] = {"runs": [], "cases": [], "rows": [], "ablation": []}
    lists = merged.keys() - {"runs"}
    for path in sorted((ROOT / "docs").glob(pattern)):
        data = json.loads(path.read_text(encoding="utf-8"))
        merged["runs"].append({key: data[key] for key in data if key not in lists})
        for key in lists:
            merged[key] += data.get(key, [])
    names = [(c["op"], c["shape"], c.get("family", "")) for c in merged["cases"]]
    names += [(row["case"],) for row in merged["rows"]]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"{pattern}: in two files: {twice[:3]}")
    return merged


def _marked(match: re.Match[str]) -> Marked:
    pairs = dict(_pairs(match["arguments"]))
    return Marked(match["pattern"], match["kind"], pairs, match["text"])


def _pairs(text: str) -> Iterator[tuple[str, str]]:
    for word in shlex.split(text):
        name, _, value = word.partition("=")
        yield name, value


def main(pages: Sequence[str]) -> int:
    """Fill the tables of pages, of all if none is named, and say what was done."""
    for page in pages or PAGES:
        path = ROOT / page
        text = path.read_text(encoding="utf-8")
        for table in marked(text):
            done = "made" if table.kept else "left: no such file"
            print(f"{page}: {table.pattern} {table.kind}: {done}")
        path.write_text(filled(text), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
