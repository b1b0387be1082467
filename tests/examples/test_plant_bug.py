"""``make demo-bisect``: the bug is planted and found. What it prints is compared with README.md by
tests/docs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.trained import trained_model

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.slow
def test_a_planted_bug_is_found(tmp_path: Path) -> None:
    planted = str(tmp_path / "planted")
    script = [sys.executable, "examples/plant_bug.py", str(trained_model()), planted]
    environment = {**os.environ, "COLUMNS": "200"}
    done = subprocess.run(
        script, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "culprit:    fuse_add_norm_across_layers site 1 (all graphs)" in done.stdout
    planted = tmp_path / "planted" / "compiler" / "passes" / "fuse_add_norm_across_layers.py"
    assert planted.read_text() != (ROOT / "passes" / planted.name).read_text()
