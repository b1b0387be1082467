"""Nothing is wrong without a fault; and what the tools say of a few faults beyond their place."""

import math
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dsa_compile.errors import CompileError
from dsa_compile.facts.layout import Layout
from dsa_compile.ir.plan import PROMPTS
from dsa_compile.passes.manager import run_pipeline
from dsa_compile.verify.bisect.bisect_artifact import bisect_artifact
from dsa_compile.verify.bisect.criteria import ReferenceCheck
from dsa_compile.verify.bisect.culprit import Cause, find_culprit
from dsa_compile.verify.bisect.search import Log
from dsa_compile.verify.checks.verify_compilation import verify
from dsa_compile.verify.execution.stages import Stage, run_stage
from dsa_compile.verify.inputs.reference import export_report
from tests.planted_bugs.conftest import Bench
from tests.planted_bugs.faults import fault_named
from tests.planted_bugs.models import compile_options
from tests.planted_bugs.planting import planted

TP2 = Layout(tp=2, shard_embedding=True)
EP2 = Layout(tp=2, ep=2, shard_embedding=True)
Benches = Callable[..., Bench]


@pytest.mark.parametrize(
    ("model", "recipe"),
    [
        ("three", "fp32"),
        pytest.param("three", "fp8", marks=pytest.mark.slow),
        pytest.param("three-glm", "fp32", marks=pytest.mark.slow),
        pytest.param("three-glm", "fp8", marks=pytest.mark.slow),
    ],
)
def test_nothing_is_wrong_without_a_fault(model: str, recipe: str, bench: Benches) -> None:
    on = bench(model, recipe)
    report = verify(on.replay(), on.store, on.prompt)
    assert report.ok, (report.wrong, report.hazards, [p.problem for p in report.passes])
    assert {site.layer for site in report.sites} >= {0, 1, 2}
    of_prompts = {s.region for s in report.sites if s.pass_name == "expand_prompt_attention"}
    kinds = {"dense", "moe"} if model == "three" else {r.split(".")[0] for r in of_prompts}
    assert of_prompts == {f"{kind}.{of}" for kind in kinds for of in PROMPTS}


def test_every_rewrite_of_a_selection_keeps_the_logits(bench: Benches) -> None:
    """Half-way through a pass one layer selects rows and the next attends to positions."""
    on = bench("three-glm")
    replay = on.replay()
    exported = run_stage(Stage.of(on.exported, on.store), on.prompt).logits()
    for name in ("recognize_sparse_attention", "insert_paged_caches"):
        (run,) = (run for run in replay.runs if run.step.name == name)
        assert len(run.sites) == 3
        for program in replay.between(run):
            logits = run_stage(Stage.of(program, on.store), on.prompt).logits()
            torch.testing.assert_close(logits, exported, rtol=0, atol=1e-4, msg=name)


def test_drafts_are_compared_with_those_of_transformers(bench: Benches) -> None:
    on = bench("three-mtp")
    report = export_report(on.recompiled, on.prompt)
    assert not report.problem
    assert {"draft", "3", "draft_head", "deeper_draft", "deeper_draft_head"} < set(report.layers)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [TP2, EP2], ids=["tp2", "ep2"])
def test_sound_values_are_those_of_one_rank(layout: Layout, bench: Benches) -> None:
    on = bench("two")
    replay = on.replay(layout, stop_after="place")
    report = verify(replay, on.store, on.prompt, only=("place",))
    assert report.ok
    assert [done.name for done in report.passes] == ["place"]
    assert all(site.exact is not None and site.exact < 1e-12 for site in report.sites)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["no-all-reduce-behind-o-proj", "residual-on-every-rank"])
def test_the_advice_of_a_refusal_leads_to_the_pass(
    name: str, bench: Benches, tmp_path: Path
) -> None:
    """What ranks cannot share is refused, with a pass to stop after; bisect then names it."""
    fault = fault_named(name)
    on, layout = bench(fault.model), compile_options(fault.options)["layout"]
    with planted(fault.plant):
        program = on.exported.fork(replace(on.exported.config, layout=layout))
        with pytest.raises(CompileError, match=fault.culprit) as refused:
            run_pipeline(program)
        (last,) = re.findall(r"--stop-after (\w+)", str(refused.value))
        replay = on.replay(layout, stop_after=last)
        check = ReferenceCheck(replay, on.store, on.prompt, on.exported)
        found = find_culprit(replay, on.store, on.prompt, check, Log("test"), tmp_path)
    assert (found.cause, found.name) == (Cause.PASS, fault.culprit)


def test_no_pass_is_blamed_for_the_export(bench: Benches, tmp_path: Path) -> None:
    with planted(fault_named("weights-of-another-layer").plant):
        on = bench("three")
        found = bisect_artifact(
            on.recompiled, on.prompt, None, None, None, tmp_path, lambda trial: None
        )
    assert found.rewrite is None
    assert found.trials == 0
    assert "layer 2 only" in found.layers


def test_the_reproducer_shows_the_difference(bench: Benches, tmp_path: Path) -> None:
    fault = fault_named("latent-rows-by-position")
    on = bench("three")
    with planted(fault.plant) as planting:
        replay = on.replay()
        check = ReferenceCheck(replay, on.store, on.prompt, on.exported)
        found = find_culprit(replay, on.store, on.prompt, check, Log("test"), tmp_path)
    assert found.rewrite is not None
    assert (found.rewrite.pass_name, found.rewrite.number) == (
        *(fault.culprit, min(planting.sites)),
    )
    assert found.trials <= 2 * math.log2(replay.count)
    assert found.problem, "seen on its own"
    _differs(found.reproducer, "latent_attention -> paged_latent_attention: ", "differ")


@pytest.mark.slow
def test_a_wrong_cut_is_found_by_every_tool(bench: Benches, tmp_path: Path) -> None:
    fault = fault_named("experts-of-the-other-rank")
    on = bench("two")
    with planted(fault.plant) as planting:
        replay = on.replay(EP2)
        report = verify(replay, on.store, on.prompt, only=(fault.culprit,))
        check = ReferenceCheck(replay, on.store, on.prompt, on.exported)
        found = find_culprit(replay, on.store, on.prompt, check, Log("test"), tmp_path)
    wrong = report.wrong[0]
    assert (wrong.pass_name, wrong.number) == (fault.culprit, min(planting.sites))
    assert found.rewrite is not None
    assert found.rewrite.pass_name == fault.culprit
    assert found.rewrite.number == wrong.number
    _differs(found.reproducer, ", rank 0: ", ", rank 1: ", "differ, relative error")


def _differs(reproducer: Path | None, *texts: str) -> None:
    """The script of a reproducer says what differs, without the fault."""
    assert reproducer is not None
    script = [sys.executable, str(reproducer / "reproduce.py")]
    done = subprocess.run(script, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    for text in texts:
        assert text in done.stdout
