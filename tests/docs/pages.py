"""The pages whose blocks are run, and a page's run from its first block to its last."""

import re
from collections.abc import Iterator
from pathlib import Path

from tests.docs.blocks import Block, blocks
from tests.docs.commands import ROOT
from tests.docs.compared import difference
from tests.docs.session import Ran, Session

PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md"))
)


def run_page(page: str, directory: Path, *, slow: bool) -> Iterator[Ran]:
    """Run a page in an empty directory, its slow blocks only if ``slow``; yield what ran."""
    session = Session(directory)
    found = blocks(ROOT, page)
    for block, follower in zip(found, [*found, None][1:], strict=True):
        if "slow" in block.directives and not slow:
            continue
        if "write" in block.directives:
            session.write(block)
        elif "excerpt" in block.directives:
            yield _excerpt(session, block)
        elif block.runs:
            output = follower if follower and "output" in follower.directives else None
            yield from session.run(block, output)


def wrong(ran: Ran) -> str | None:
    """Problem of a command that ran, or None."""
    head = f"{ran.block.where}: {ran.command}"
    expected = int(ran.block.directives.get("exit", 0))
    if ran.status != expected:
        return f"{head}: exit status {ran.status}, not {expected}\n{ran.printed}"
    if ran.shown is None:
        return None
    # a program whose output the page does not show may print nothing that a reader would miss
    found = difference(ran.shown, ran.printed)
    return None if found is None else f"{head}: {found}"


def has_slow(page: str) -> bool:
    """Whether something on a page is left to the slow tests."""
    return any("slow" in block.directives for block in blocks(ROOT, page))


def inline_commands(page: str) -> Iterator[str]:
    """Commands in the running text, such as ``dsa-inspect ARTIFACT diff PASS``."""
    text = re.sub(r"^ *```.*?^ *```$", "", (ROOT / page).read_text(), flags=re.M | re.S)
    return (match[1] for match in re.finditer(r"`(dsa-[a-z]+ [^`\n]+)`", text))


def _excerpt(session: Session, block: Block) -> Ran:
    pattern = block.directives["excerpt"]
    texts = list(session.files(pattern))
    failures = [difference(f"…\n{block.text}…\n", text) for text in texts]
    # shown is found in one of them, or compared with the first
    best = texts[failures.index(None)] if None in failures else "".join(texts[:1])
    return Ran(block, pattern, f"…\n{block.text}…\n", block.line, best, 0 if texts else 1)
