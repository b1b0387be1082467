"""The load script for a while: no error, no leaked block, every answer that of the engine."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "serve_load.py"


@pytest.mark.slow
def test_streams_of_which_some_leave(artifact: Path) -> None:
    load = ["--clients", "64", "--seconds", "10", "--requests", "96", "--tokens", "48"]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--artifact", str(artifact), *load],
        capture_output=True,
        text=True,
        cwd=SCRIPT.parents[1],
    )
    assert done.returncode == 0, done.stderr
    found = re.search(r"(\d+) answers, all equal.*, (\d+) left", done.stdout)
    assert found, done.stdout
    answers, left = map(int, found.groups())
    assert answers >= 32
    assert left >= 1
    assert "every block came back" in done.stdout
