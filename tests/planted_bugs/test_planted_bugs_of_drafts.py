"""Bugs of drafting alone: in its plans, in how its prologue is traced, in passes over that."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import fx

from dsa_compile.ir.plan import DEEPER, DRAFT
from dsa_compile.ir.program import Program
from dsa_compile.ir.region import Region
from dsa_compile.verify.bisect.bisect_artifact import bisect_artifact
from dsa_compile.verify.checks.verify_compilation import verify
from dsa_compile.verify.execution.replay import Replay
from dsa_compile.verify.inputs.reference import export_report
from dsa_compile.verify.recompiled_artifact import RecompiledArtifact
from dsa_compile.weights.plan import WeightPlan
from tests.planted_bugs.conftest import Bench
from tests.planted_bugs.planting import PlantedBug, Struck, given, input_of, inserting, scaled

aten, dsa = torch.ops.aten, torch.ops.dsa
MTP = "model.layers.3"


def call_given(plan: str, place: int, **strings: str) -> Callable[[Program], Program]:
    """A call of a plan is given other weights by name."""

    def plant(program: Program) -> Program:
        calls = list(program.plans[plan].calls)
        calls[place] = replace(calls[place], vars={**calls[place].vars, **strings})
        plans = {**program.plans, plan: replace(program.plans[plan], calls=tuple(calls))}
        return replace(program, plans=plans)

    return plant


def retraced(change: Callable[[Region], None]) -> Callable[[Program], Program]:
    """The prologue of a draft is traced otherwise."""

    def plant(program: Program) -> Program:
        made = program.regions[DRAFT].copy(DRAFT)
        change(made)
        return replace(program, regions={**program.regions, DRAFT: made})

    return plant


def taken(region: Region, key: str) -> fx.Node:
    return next(node for node in region.inputs() if node.meta["key"] == key)


def raw_states(region: Region) -> None:
    normed = [n for n in region.graph.nodes if n.meta.get("path") == "norm"][-1]
    normed.replace_all_uses_with(taken(region, "hidden"))


def joined_backwards(region: Region) -> None:
    """State first; RoPE's tables are made with ``cat``, too."""
    projection = taken(region, "eh_proj.weight").meta["val"]
    joins = (n for n in region.graph.nodes if n.target is aten.cat.default)
    (joined,) = (n for n in joins if n.meta["val"].shape[-1] == projection.shape[1])
    parts, *rest = joined.args
    joined.args = (parts[::-1], *rest)


def positions_twice_as_far(region: Region) -> None:
    """Keys and queries are rotated alike, so positions that are all one ahead change nothing."""
    positions = taken(region, "positions")
    with region.graph.inserting_after(positions):
        far = region.graph.call_function(aten.mul.Tensor, (positions, 2))
    far.meta.update(positions.meta, role=None)
    positions.replace_all_uses_with(far, delete_user_cb=lambda user: user is not far)


def norms_exchanged(program: Program) -> Program:
    weights = WeightPlan.from_json(program.weights.to_json())
    one, other = (next(k for k in weights.entries(DRAFT) if n in k) for n in ("enorm", "hnorm"))
    a, b = weights.remove(DRAFT, one), weights.remove(DRAFT, other)
    weights.define(DRAFT, one, b)
    weights.define(DRAFT, other, a)
    return replace(program, weights=weights)


EXPORTED = {
    "raw states before the first draft": (retraced(raw_states), "draft"),
    "norm of the draft's head before the first draft": (
        call_given(DRAFT, 0, norm=f"{MTP}.shared_head.norm"), "draft",
    ),
    "norm of the model before a deeper draft": (
        call_given(DEEPER, 0, norm="model.norm"), "deeper_draft",
    ),
    "norm of the model before the draft's head": (
        call_given(DRAFT, 2, norm="model.norm"), "draft_head",
    ),
    "weights of another layer": (call_given(DRAFT, 1, layer="model.layers.2"), 3),
    "norms of token and state exchanged": (norms_exchanged, "draft"),
    "state and token joined backwards": (retraced(joined_backwards), "draft"),
    "positions twice as far apart": (retraced(positions_twice_as_far), 3),
}  # fmt: skip


@pytest.fixture(scope="module")
def drafting(bench: Callable[..., Bench]) -> Bench:
    return bench("fp32", draft=True)


@pytest.fixture(scope="module")
def recompiled(drafting: Bench) -> RecompiledArtifact:
    nowhere = cast(Any, None)  # an artifact is what trials are kept for, and none is made
    exported = drafting.exported
    return RecompiledArtifact(
        nowhere, exported, Replay(exported), drafting.store, drafting.model_dir, dummy=False
    )


def test_drafts_are_compared_with_those_of_transformers(
    recompiled: RecompiledArtifact, drafting: Bench
) -> None:
    report = export_report(recompiled, drafting.prompt)
    assert not report.problem
    assert {"draft", "3", "draft_head", "deeper_draft", "deeper_draft_head"} < set(report.layers)


@pytest.mark.parametrize("name", EXPORTED)
def test_a_draft_that_is_exported_wrongly_is_named(
    name: str, recompiled: RecompiledArtifact, drafting: Bench, tmp_path: Path
) -> None:
    plant, layer = EXPORTED[name]
    wrong = replace(recompiled, exported=plant(drafting.exported))
    where = f"layer {layer}" if isinstance(layer, int) else layer
    assert export_report(wrong, drafting.prompt).problem.startswith(f"{where} differs")
    found = bisect_artifact(wrong, drafting.prompt, None, None, None, tmp_path, lambda trial: None)
    assert found.rewrite is None
    assert layer in {finding.layer for finding in found.findings}


PASSES = (
    PlantedBug(
        "eps of the draft's norms",
        "recognize_rms_norm",
        inserting("recognize_rms_norm", dsa.rms_norm.default, scaled(2, 1e4), region=DRAFT),
    ),
    PlantedBug(
        "the position in place of the token",
        "recognize_embedding",
        inserting(
            "recognize_embedding", dsa.embedding.default, given(0, input_of("positions")),
            region=DRAFT,
        ),
    ),
    PlantedBug(
        "the token in place of the position",
        "recognize_rope_tables",
        inserting(
            "recognize_rope_tables", dsa.rope_tables.default, given(0, input_of("input_ids")),
            region=DRAFT,
        ),
    ),
)  # fmt: skip


@pytest.mark.parametrize("bug", PASSES, ids=lambda bug: bug.name)
def test_a_pass_that_is_wrong_about_drafts_is_named(
    bug: PlantedBug, drafting: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    struck = Struck()
    with monkeypatch.context() as patch:
        bug.plant(patch, struck)
        replay = Replay(drafting.exported)
        report = verify(replay, drafting.store, drafting.prompt, (bug.pass_name,))
    assert {site.pass_name for site in report.wrong} == {bug.pass_name}
    assert {site.number for site in report.wrong} == struck.sites
    assert {site.region for site in report.wrong} == {DRAFT}
