"""README, CONTRIBUTING and docs: every block runs and prints what the page shows."""

import re
from pathlib import Path

import pytest

from tests.docs.blocks import blocks
from tests.docs.commands import ROOT, calls, options, parser, parses
from tests.docs.pages import PAGES, has_slow, inline_commands, run_page, wrong
from tests.trained import trained_model


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(ROOT, page)])
def test_every_block_is_accounted_for(page: str) -> None:
    lost = [block.where for block in blocks(ROOT, page) if not block.accounted]
    assert not lost, "neither run nor marked; see tests/docs/blocks.py"


@pytest.mark.parametrize("page", PAGES)
def test_every_command_shown_parses(page: str) -> None:
    """Commands that are not run here must parse too."""
    texts = [block.text for block in blocks(ROOT, page) if block.language in ("sh", "console")]
    lines = re.sub(r"\\\n *", "", "".join(texts)).splitlines()
    refused = {
        " ".join(words): error
        for line in lines
        if (command := line.removeprefix("$ ")).startswith("dsa-")
        for words in calls(command)
        if (error := parses(words)) is not None
    }
    assert not refused


@pytest.mark.parametrize("page", PAGES)
def test_every_option_in_a_sentence_exists(page: str) -> None:
    """Such as ``dsa-inspect diff --layer``, whatever it leaves out."""
    unknown = {
        (name, option)
        for name, *words in map(str.split, inline_commands(page))
        for option in re.findall(r"(?<!\S)--[a-z-]+", " ".join(words))
        if option not in options(parser(name))
    }
    assert not unknown


@pytest.mark.slow
@pytest.mark.parametrize("page", [p for p in PAGES if any(b.runs for b in blocks(ROOT, p))])
def test_a_page_runs_as_printed(page: str, tmp_path: Path) -> None:
    trained_model()  # which all pages begin with
    failures = [why for ran in run_page(page, tmp_path, slow=False) if (why := wrong(ran))]
    assert not failures, "\n\n".join(failures)


@pytest.mark.slow
@pytest.mark.parametrize("page", list(filter(has_slow, PAGES)))
def test_a_page_runs_whole(page: str, tmp_path: Path) -> None:
    trained_model()
    failures = [why for ran in run_page(page, tmp_path, slow=True) if (why := wrong(ran))]
    assert not failures, "\n\n".join(failures)
