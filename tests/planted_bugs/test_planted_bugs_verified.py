"""Planted bugs that halving would lose among the roundings of FP8, and hazards of streams."""

from collections.abc import Callable

import pytest

from dsa_compile.verify.checks.verify_compilation import illegal, verify
from dsa_compile.verify.execution.replay import Replay
from tests.planted_bugs.catalogue_fused import FP8, STREAMS
from tests.planted_bugs.conftest import Bench
from tests.planted_bugs.planting import PlantedBug, Struck
from tests.planted_bugs.sampled import sampled


@pytest.mark.parametrize("bug", sampled(FP8))
def test_verification_names_pass_and_site(
    bug: PlantedBug, bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    on, struck = bench(bug.recipe), Struck()
    with monkeypatch.context() as patch:
        bug.plant(patch, struck)
        replay = Replay(on.exported)
        names = [run.step.name for run in replay.runs]
        last = names[names.index("quantize_projections") :]
        report = verify(replay, on.store, on.prompt, last)
    assert {site.pass_name for site in report.wrong} == {bug.pass_name}
    assert {site.number for site in report.wrong} == struck.sites
    assert [done.name for done in report.passes if done.problem] == [bug.pass_name]


def test_nothing_is_wrong_without_a_fault(bench: Callable[..., Bench]) -> None:
    on = bench("fp32")
    report = verify(Replay(on.exported), on.store, on.prompt)
    assert report.ok, (report.wrong, report.hazards)
    assert len(report.sites) > len(report.passes)


@pytest.mark.parametrize("bug", sampled(STREAMS))
def test_hazards_are_laid_to_the_overlap(
    bug: PlantedBug, bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    on, struck = bench(bug.recipe, "sm_90a"), Struck()
    with monkeypatch.context() as patch:
        bug.plant(patch, struck)
        replay = Replay(on.exported)
        found = list(illegal(replay))
    assert found
    assert {hazard.pass_name for hazard in found} == {bug.pass_name}
    assert {hazard.number for hazard in found} <= struck.sites
    calls = {n.name: n for r in replay.final.regions.values() for n in r.graph.nodes}
    for hazard in found:
        first, second = hazard.nodes
        assert first in calls
        assert second in calls
        assert first in hazard.problem or second in hazard.problem
