"""Rewrite what the pages show of outputs, from a run: ``python -m tests.docs.update [PAGE…]``.

Lines left out (``…``) stay left out: between them stand the printed lines most like those shown.
Whoever changes what a command prints runs this, and reads the difference before committing it.
"""

import difflib
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.docs import cli_page, options_page, recipes_table
from tests.docs.commands import ROOT
from tests.docs.compared import matches
from tests.docs.pages import PAGES, run_page, wrong
from tests.docs.session import Ran

_ELIDED = "…"


def main(pages: Sequence[str]) -> int:
    """Update pages, all of them if none is named; 1 if something failed for another reason."""
    for made in (cli_page, options_page, recipes_table):
        if not pages or made.PAGE in pages:
            (ROOT / made.PAGE).write_text(made.page(), encoding="utf-8")
    failed = False
    for page in pages or PAGES:
        with tempfile.TemporaryDirectory() as directory:
            ran = [one for one in run_page(page, Path(directory), slow=True) if wrong(one)]
        # from the end, so that line numbers stay those of the page
        for one in reversed(ran):
            replaced = _replace(one)
            print(f"{one.block.where}: {one.command}: {'updated' if replaced else wrong(one)}")
            failed = failed or not replaced
    return int(failed)


def _replace(ran: Ran) -> bool:
    """Put what was printed where the page shows it; False if something else is wrong."""
    if ran.shown is None or ran.status != int(ran.block.directives.get("exit", 0)):
        return False
    path = ROOT / ran.block.page
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    start, stop = ran.line - 1, ran.line - 1 + ran.shown.count("\n")
    new = fitted(ran.shown, ran.printed)
    lines[start:stop] = [f"{ran.block.indent}{line}\n" for line in new]
    path.write_text("".join(lines), encoding="utf-8")
    return True


def fitted(shown: str, printed: str) -> list[str]:
    """Printed lines, left out where lines are left out in ``shown``."""
    wanted, given = shown.splitlines(), [line.rstrip() for line in printed.strip("\n").splitlines()]
    if _ELIDED not in map(str.strip, wanted):
        return given
    found: list[str] = []
    place = 0
    for line in wanted:
        if line.strip() == _ELIDED or place >= len(given):
            found.append(line)
            continue
        if as_shown := [i for i, other in enumerate(given[place:]) if matches(line, other)]:
            found.append(line)
            place += as_shown[0] + 1
            continue
        ratios = [difflib.SequenceMatcher(None, line, other).ratio() for other in given[place:]]
        place += ratios.index(max(ratios)) + 1
        found.append(given[place - 1])
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
