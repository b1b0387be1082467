"""The documentation as a site: built offline without a warning, with search and the Python API."""

import sys
from pathlib import Path

import pytest

from tests.installation import ROOT, offline, run

API = {
    "compiling": ["dsa_compile.compile", "dsa_compile.CompileConfig"],
    "runtime": [f"dsa_compile.runtime.{n}" for n in ("Engine", "AsyncEngine", "SamplingParams")],
    "passes": [
        *("dsa_compile.ir.passes.Pass", "dsa_compile.ir.edit.Editor"),
        *("dsa_compile.ir.program.Program", "dsa_compile.ir.match.Call"),
    ],
    "inspecting": ["dsa_compile.inspect.store.Store", "dsa_compile.inspect.diff.RegionDiff"],
}


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    for package in ("sphinx", "myst_parser", "furo"):
        pytest.importorskip(package)
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-c", "docs/site", "."]
    run([*command, str(tmp_path / "site"), "-d", str(tmp_path / "read")], ROOT, offline())
    assert (tmp_path / "site" / "searchindex.js").is_file()
    assert (tmp_path / "site" / "index.html").is_file()
    for page, names in API.items():
        text = (tmp_path / "site" / "docs" / "api" / f"{page}.html").read_text(encoding="utf-8")
        assert [name for name in names if f'id="{name}"' not in text] == []
