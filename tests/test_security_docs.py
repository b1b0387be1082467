"""Every test that docs/security.md names for a claim is there."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_tests_that_hold_the_claims_exist():
    text = (ROOT / "docs/security.md").read_text(encoding="utf-8")
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", text)
    assert len(named) > 25
    for file, test in named:
        source = (ROOT / file).read_text(encoding="utf-8")
        assert f"def {test}(" in source if test else "def test_" in source, f"{file}::{test}"
