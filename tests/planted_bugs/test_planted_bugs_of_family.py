"""Planted bugs in a model whose last layer attends to what an earlier one selected."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dsa_compile.verify.bisect.criteria import ReferenceCheck
from dsa_compile.verify.bisect.culprit import find_culprit
from dsa_compile.verify.bisect.search import Log
from dsa_compile.verify.checks.verify_compilation import verify
from dsa_compile.verify.execution.replay import Replay
from dsa_compile.verify.execution.stages import Stage, run_stage
from tests.planted_bugs.conftest import Bench
from tests.planted_bugs.planting import PlantedBug, Struck
from tests.planted_bugs.test_planted_bugs_bisected import BUGS

# Those of the catalogue that a model of this kind has a site for, from each part of a layer.
APPLY = (
    "eps of one norm",
    "cos and sin exchanged",
    "weights of experts not normalised",
    "a key too few",
    "stale index key: written after it is read",
    "latent rows written by position",
)
_SAMPLED = "a key too few"


def test_every_rewrite_of_a_selection_keeps_the_logits(bench: Callable[..., Bench]) -> None:
    """Half-way through a pass one layer selects rows and the next attends to positions."""
    on = bench("fp32", glm=True)
    replay = Replay(on.exported)
    exported = run_stage(Stage.of(on.exported, on.store), on.prompt).logits()
    for name in ("recognize_sparse_attention", "insert_paged_caches"):
        (run,) = (run for run in replay.runs if run.step.name == name)
        assert len(run.sites) == 3
        for program in replay.between(run):
            logits = run_stage(Stage.of(program, on.store), on.prompt).logits()
            torch.testing.assert_close(logits, exported, rtol=0, atol=1e-4, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["fp32", "fp8"])
def test_nothing_is_wrong_without_a_fault(bench: Callable[..., Bench], recipe: str) -> None:
    on = bench(recipe, glm=True)
    report = verify(Replay(on.exported), on.store, on.prompt)
    assert report.ok, (report.wrong, report.hazards, [p.problem for p in report.passes])
    assert {site.layer for site in report.sites} >= {0, 1, 2}


@pytest.mark.parametrize(
    "bug",
    [
        pytest.param(bug, id=bug.name, marks=() if bug.name == _SAMPLED else pytest.mark.slow)
        for bug in BUGS
        if bug.name in APPLY
    ],
)
def test_bisection_and_verification_name_pass_and_site(
    bug: PlantedBug,
    bench: Callable[..., Bench],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    on, struck = bench(bug.recipe, glm=True), Struck()
    with monkeypatch.context() as patch:
        bug.plant(patch, struck)
        replay = Replay(on.exported)
        check = ReferenceCheck(replay, on.store, on.prompt, on.exported)
        found = find_culprit(replay, on.store, on.prompt, check, Log("test"), tmp_path)
        report = verify(replay, on.store, on.prompt, [bug.pass_name])
    assert struck.sites
    assert found.rewrite is not None
    assert found.rewrite.pass_name == bug.pass_name
    assert found.rewrite.number == min(struck.sites)
    assert found.trials <= 2 * math.log2(replay.count)
    assert found.problem, "seen on its own"
    assert {site.number for site in report.wrong} == struck.sites
