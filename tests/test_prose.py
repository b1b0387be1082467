"""Docstrings in plain English: each names what it documents, and none speaks in riddles."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ("dsa_compile", "passes", "lowering", "runtime")
OTHERS = ("tests", "examples", "benchmarks")
TEMPLATE = "dsa_compile/verify/bisect/reproduce.txt"  # Python that bisect writes for users

# A docstring begins with the noun or verb that somebody would search for, which none of these is.
OPENINGS = re.compile(
    r"(What|The same|That|Those|Who|How|Where|Why|It|Its|They|Their|And|Or|If|When|Of)\b"
)
RIDDLES = re.compile(r"\b(told|hears?|heard|nobody asked|is asked|asked for)\b", re.IGNORECASE)


def docstrings(source: str) -> Iterator[str]:
    """Docstrings of a module, those behind attributes and constants too."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield text.strip()


def found_in(folders: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Docstrings in folders, each with the name of its file."""
    paths = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    assert len(paths) >= len(folders)
    for path in (ROOT / TEMPLATE, *paths):
        for text in docstrings(path.read_text(encoding="utf-8")):
            yield str(path.relative_to(ROOT)), text


def test_docstrings_begin_with_a_noun_or_verb() -> None:
    assert not [(name, text) for name, text in found_in(PACKAGE + OTHERS) if OPENINGS.match(text)]


def test_docstrings_have_no_riddles() -> None:
    assert not [(name, text) for name, text in found_in(PACKAGE) if RIDDLES.search(text)]


@pytest.mark.parametrize(
    "source",
    [
        '"""What a module does."""',
        'class A:\n    """\n    The same\n    with more lines.\n    """',
        'def f():\n    r"""Its result."""',
        'async def f():\n    "If it ends."',
        'LIMIT = 1\n"""How many there may be."""',
    ],
    ids=["module", "class", "function", "async", "constant"],
)
def test_bad_openings_are_found(source: str) -> None:
    (text,) = docstrings(source)
    assert OPENINGS.match(text)


@pytest.mark.parametrize("text", ["Iteration of a loop.", "The sampled tokens.", "Offsets."])
def test_words_are_taken_whole(text: str) -> None:
    assert not OPENINGS.match(text)
