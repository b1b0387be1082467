"""Planted bugs, found by halving: pass, site, layer, and in how many trials."""

import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dsa_compile.verify.bisect.criteria import ReferenceCheck
from dsa_compile.verify.bisect.culprit import find_culprit
from dsa_compile.verify.bisect.search import Log
from dsa_compile.verify.execution.replay import Replay
from tests.planted_bugs.catalogue import RECOGNISE, RESTRUCTURE
from tests.planted_bugs.catalogue_fused import FUSE
from tests.planted_bugs.conftest import Bench
from tests.planted_bugs.planting import PlantedBug, Struck
from tests.planted_bugs.sampled import sampled

BUGS = (*RECOGNISE, *RESTRUCTURE, *FUSE)


@pytest.mark.parametrize("bug", sampled(BUGS))
def test_bisection_names_pass_and_site(
    bug: PlantedBug,
    bench: Callable[..., Bench],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    on, struck = bench(bug.recipe), Struck()
    with monkeypatch.context() as patch:
        bug.plant(patch, struck)
        replay = Replay(on.exported)
        check = ReferenceCheck(replay, on.store, on.prompt, on.exported)
        found = find_culprit(replay, on.store, on.prompt, check, Log("test"), tmp_path)
    record_property("trials", found.trials)
    assert found.rewrite is not None
    assert found.rewrite.pass_name == bug.pass_name
    assert found.rewrite.number == min(struck.sites)
    assert found.trials <= 2 * math.log2(replay.count)
    assert found.problem, "seen on its own"
    if bug.layers:
        assert tuple(finding.layer for finding in found.findings) == bug.layers
    assert found.reproducer is not None


def test_the_reproducer_shows_the_difference(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    on = bench("fp32")
    bug = next(f for f in BUGS if f.name == "latent rows written by position")
    with monkeypatch.context() as patch:
        bug.plant(patch, Struck())
        replay = Replay(on.exported)
        check = ReferenceCheck(replay, on.store, on.prompt, on.exported)
        found = find_culprit(replay, on.store, on.prompt, check, Log("test"), tmp_path)
    assert found.reproducer is not None
    script = [sys.executable, str(found.reproducer / "reproduce.py")]
    done = subprocess.run(script, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert "latent_attention -> paged_latent_attention: " in done.stdout
    assert "differ" in done.stdout
