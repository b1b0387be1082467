"""Fenced blocks of a Markdown page, and the comments that say what is done with them.

A block of ``sh``, ``console`` or ``python`` runs, unless a comment on the line before it says
otherwise; any other block needs such a comment. Several stand in one, separated by ``;``.

``<!-- docs: skip REASON -->``   not run; REASON is one of :data:`REASONS`
``<!-- docs: output -->``        what the Python block before it prints
``<!-- docs: excerpt GLOB -->``  lines of a file that exists by then
``<!-- docs: write FILE -->``    its text goes into a file
``<!-- docs: exit N -->``        its last command ends with status N
``<!-- docs: slow -->``          left to the slow tests
``<!-- docs: run COMMAND -->``   no block: a command that the page does not show, run at this place
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

REASONS = {
    "gpu": "needs a GPU",
    "checkpoint": "needs the released checkpoint, 690 GB",
    "installs": "installs packages, or works on the repository itself",
    "measures": "needs the records of a measurement on a GPU",
    "serves": "starts a server, or asks one that runs",
    "sketch": "code with parts left out",
    "figure": "no command: a layout, a formula, a message",
    "checked elsewhere": "another test follows it",
}
ACTIONS = ("skip", "output", "excerpt", "write", "exit", "slow")
LANGUAGES = ("sh", "console", "python")

_PART = re.compile(
    r"^<!-- docs: run (?P<command>[^\n]*?) -->$"
    r"|(?:^ *<!-- docs: (?P<directives>[^\n]*?) -->\n)?"
    r"^(?P<indent> *)```(?P<language>\w*)\n(?P<text>.*?)^(?P=indent)```$",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True)
class Block:
    """A fenced block, or commands that the page does not show.

    Attributes:
        page: the file, relative to the repository.
        line: of its first line of text, from 1.
        language: the word behind the fence.
        text: what is between the fences, without the fence's own indentation.
        indent: that indentation.
        directives: actions of the comment before it, each with its argument.
    """

    page: str
    line: int
    language: str
    text: str
    indent: str
    directives: dict[str, str]

    @property
    def where(self) -> str:
        """For messages, such as ``README.md:12``."""
        return f"{self.page}:{self.line}"

    @property
    def runs(self) -> bool:
        """Whether it is executed."""
        kept = self.directives.keys() & {"skip", "output", "excerpt", "write"}
        return not kept and self.language in LANGUAGES

    @property
    def accounted(self) -> bool:
        """Whether the page says what is done with it."""
        return self.runs or bool(self.directives.keys() - {"slow", "exit"})


def blocks(root: Path, page: str) -> list[Block]:
    """Everything on a page that a session takes, in order."""
    text = (root / page).read_text(encoding="utf-8")
    return list(_blocks(page, text))


def _blocks(page: str, text: str) -> Iterator[Block]:
    for match in _PART.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        if command := match["command"]:
            slow, _, rest = command.partition("slow: ")
            yield Block(page, line, "sh", rest or slow, "", {"slow": ""} if rest else {})
            continue
        body = re.sub(rf"^{match['indent']}", "", match["text"], flags=re.MULTILINE)
        line = text.count("\n", 0, match.start("text")) + 1
        directives = dict(_directives(match["directives"] or "", f"{page}:{line}"))
        yield Block(page, line, match["language"], body, match["indent"], directives)


def _directives(text: str, where: str) -> Iterator[tuple[str, str]]:
    for part in filter(None, map(str.strip, text.split(";"))):
        action, _, argument = part.partition(" ")
        assert action in ACTIONS, f"{where}: {action!r} is none of {ACTIONS}"
        if action == "skip":
            assert argument in REASONS, f"{where}: {argument!r} is none of {sorted(REASONS)}"
        yield action, argument
