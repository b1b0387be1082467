"""Purpose and drawings of a pass, from the docstring of its module.

The form is that of every file in ``passes/``: a line of purpose, paragraphs, and literal blocks
that a line ending in ``::`` introduces. A line ``Before::   After::`` introduces two side by side.
"""

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

_MARKS = re.compile(r"``(.+?)``|:\w+:`(.+?)`|\*(\w[^*]*)\*")
_TITLES = re.compile(r"(?P<before>Before.*?)::\s+(?P<after>After.*?)::")


@dataclass(frozen=True)
class Prose:
    """A paragraph as one line, with the marks of a docstring: ````code```` and ``*emphasis*``."""

    text: str


@dataclass(frozen=True)
class Drawing:
    """Literal text beside literal text, or alone; titles such as ``Before (RoPE angles)``."""

    title: str
    text: str
    title_after: str = ""
    text_after: str = ""


@dataclass(frozen=True)
class About:
    """Purpose of a pass: one line, and the rest of its docstring."""

    purpose: str
    rest: tuple[Prose | Drawing, ...]

    @property
    def plain_purpose(self) -> str:
        """The purpose without the marks of code and emphasis."""
        return _MARKS.sub(lambda mark: next(filter(None, mark.groups())), self.purpose)


def parse_about(text: str) -> About:
    """Read a docstring; any text is one."""
    purpose, *blocks = re.split(r"\n\s*\n", text.strip("\n")) if text.strip() else [""]
    return About(_joined(purpose), tuple(_parts(blocks)))


def _parts(blocks: list[str]) -> Iterator[Prose | Drawing]:
    title = ""
    for block in blocks:
        if title and block.startswith(" "):
            yield _drawing(title, block)
            title = ""
        elif block.endswith("::"):
            title = block
        else:
            yield Prose(_joined(block))


def _drawing(title: str, block: str) -> Drawing:
    sides = _TITLES.fullmatch(title)
    if sides is None:
        return Drawing(_joined(title).removesuffix("::"), textwrap.dedent(block))
    lines = block.splitlines()
    column = _right_side(lines, sides.start("after"))
    # a line that goes on beyond the column belongs to the left side
    ends = [column if not line[column - 2 : column].strip() else len(line) for line in lines]
    left = [line[:end].rstrip() for line, end in zip(lines, ends, strict=True)]
    right = [line[end:].rstrip() for line, end in zip(lines, ends, strict=True)]
    before, after = (textwrap.dedent("\n".join(side)).rstrip() for side in (left, right))
    return Drawing(sides["before"], before, sides["after"], after)


def _right_side(lines: list[str], title: int) -> int:
    """The first column, from that of the title on, where text begins after a gap."""
    begins = re.compile(r"(?<=  )\S")
    found = [match.start() for line in lines if (match := begins.search(line, title))]
    return min(found, default=title)


def _joined(text: str) -> str:
    return " ".join(text.split())
