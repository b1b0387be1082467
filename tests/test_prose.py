"""Docstrings in plain English: none begins with "Of" or says "told" for report, log or request."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("dsa_compile", "passes", "lowering", "runtime")
RIDDLES = re.compile(r"\b(told|hears?|heard|nobody asked|is asked|asked for)\b", re.IGNORECASE)

# Files that still break a rule; take out each that no longer does.
OPENS_WITH_OF: set[str] = set()
TELLS_RIDDLES = {"dsa_compile/cli/eval.py", "dsa_compile/cli/inspect/diff.py"}


def docstrings(path: Path) -> Iterator[str]:
    """Docstrings of a file, those behind attributes and constants too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield text.strip()


SOURCES = {
    str(path.relative_to(ROOT)): path
    for folder in FOLDERS
    for path in sorted((ROOT / folder).rglob("*.py"))
}


@pytest.mark.parametrize(
    ("pattern", "exceptions"),
    [(re.compile(r"\AOf "), OPENS_WITH_OF), (RIDDLES, TELLS_RIDDLES)],
    ids=["of", "riddles"],
)
def test_docstrings_are_plain(pattern: re.Pattern[str], exceptions: set[str]) -> None:
    found = {
        name: text
        for name, path in SOURCES.items()
        for text in docstrings(path)
        if pattern.search(text)
    }
    assert not {name: text for name, text in found.items() if name not in exceptions}
    assert exceptions <= SOURCES.keys(), "a file that is gone leaves the list"
