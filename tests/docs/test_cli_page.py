"""docs/cli.md and docs/options.md have every option, docs/recipes.md every recipe."""

from types import ModuleType

import pytest

from tests.docs import cli_page, options_page, recipes_table
from tests.docs.commands import ROOT


@pytest.mark.parametrize("made", [cli_page, options_page, recipes_table])
def test_the_page_is_what_the_data_say(made: ModuleType) -> None:
    written = (ROOT / made.PAGE).read_text(encoding="utf-8")
    assert written == made.page(), f"run python -m tests.docs.update {made.PAGE}"
