"""Comparison of what a page shows with what was printed, but for what differs from run to run."""

import re
from collections.abc import Iterable, Iterator

_VOLATILE = (
    (re.compile(r"\x1b\[[0-9;]*m"), ""),
    # the numbers of lines of transformers' source, which its releases move
    (re.compile(r"^ {4}\d+ {2}(?=\S.* {2}# \w+$)"), "LINE "),
    (re.compile(r"/tmp/[^\s'\"]+"), "PATH"),
    (re.compile(r"\b[0-9a-f]{12,64}\b"), "DIGEST"),
    # errors of floating-point sums, which the processor decides
    (re.compile(r"\b\d(\.\d+)?e[-+]\d+"), "ERROR"),
    # durations, rates and sizes
    (re.compile(r"[\d.,]+ ?(tok/s|tokens/s|µs|ms|s|[kMG]i?B)\b"), r"N \1"),
    (re.compile(r"\b\d+\.\d+\.\d+(\+\w+)?\b"), "VERSION"),
    (re.compile(r"[─━═]+"), "─"),
    (re.compile(r"[ \t]+"), " "),
)
_MS = re.compile(r"\bms\b(?=  |$)")  # the head of a column of milliseconds


def masked(text: str) -> list[str]:
    """Lines without what is volatile, such as the numbers of a table's column ``ms``."""
    return [_masked(line) for line in _without_times(text.splitlines())]


def matches(shown: str, printed: str) -> bool:
    """Whether a line of a page, in which ``…`` stands for any text, is a printed line."""
    return bool(re.fullmatch(_within(_masked(shown)), _masked(printed)))


def _masked(line: str) -> str:
    for pattern, replacement in _VOLATILE:
        line = pattern.sub(replacement, line)
    return line.rstrip()


def _without_times(lines: Iterable[str]) -> Iterator[str]:
    """Blank the number below the head ``ms`` in each line of a table; its last digit is there."""
    column = None
    for line in lines:
        if head := _MS.search(line.rstrip()):
            column = head.end()
        elif not line.strip():
            column = None
        elif column is not None and (number := re.search(r"[\d.]+$", line[:column])):
            line = f"{line[: number.start()]} N {line[column:]}"
        yield line


def difference(shown: str, printed: str) -> str | None:
    """Difference of ``printed`` from what a page shows, or None.

    A line ``…`` of the page stands for any lines, ``…`` within one for any text.
    """
    wanted, given = masked(shown.strip("\n")), masked(printed.strip("\n"))
    pattern = "".join(map(_line_pattern, wanted))
    if re.fullmatch(pattern, "".join(f"{line}\n" for line in given)):
        return None
    missing = [line for line in wanted if not _elided(line) and not _among(line, given)]
    head = "shown and not printed" if missing else "printed otherwise than shown"
    return "\n".join([f"{head}:", *(missing or wanted), "", "printed:", printed])


def _elided(line: str) -> bool:
    return line.strip() == "…"


def _line_pattern(line: str) -> str:
    return r"(?:.*\n)*?" if _elided(line) else _within(line) + r"\n"


def _within(line: str) -> str:
    return "[^\n]*".join(map(re.escape, line.split("…")))


def _among(line: str, given: list[str]) -> bool:
    return any(re.fullmatch(_within(line), other) for other in given)
