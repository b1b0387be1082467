"""docs/cli.md has every option of every command."""

from tests.docs import cli_page
from tests.docs.commands import ROOT


def test_the_page_is_what_the_parsers_say() -> None:
    written = (ROOT / cli_page.PAGE).read_text(encoding="utf-8")
    assert written == cli_page.page(), "run python -m tests.docs.update docs/cli.md"
