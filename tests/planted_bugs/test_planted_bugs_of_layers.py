"""Bugs of one layer's plan: no graph is wrong, and all layers of a kind share theirs."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from dsa_compile.ir.plan import MODEL, Call, Plan
from dsa_compile.ir.program import Program
from dsa_compile.verify.bisect.bisect_artifact import bisect_artifact
from dsa_compile.verify.bisect.criteria import ReferenceCheck
from dsa_compile.verify.bisect.culprit import find_culprit
from dsa_compile.verify.bisect.search import Log
from dsa_compile.verify.execution.replay import Replay
from dsa_compile.verify.inputs.reference import export_report
from dsa_compile.verify.recompiled_artifact import RecompiledArtifact
from tests.planted_bugs.conftest import Bench

Layers = tuple[Call, ...]


def planted(program: Program, plant: Callable[[Layers], Layers]) -> Program:
    calls = program.plans[MODEL].calls
    layers = program.layers
    made = (*calls[:1], *plant(layers), *calls[1 + len(layers) :])
    return replace(program, plans={MODEL: Plan(made, program.plans[MODEL].results)})


def skipped(layers: Layers) -> Layers:
    return tuple(entry for entry in layers if entry.index != 1)


def weights_of_another(layers: Layers) -> Layers:
    wrong = replace(layers[2], vars={**layers[2].vars, "layer": "model.layers.1"})
    return (*layers[:2], wrong)


def next_norm_of_the_model(layers: Layers) -> Layers:
    wrong = replace(layers[1], vars={**layers[1].vars, "next_norm": "model.norm"})
    return (layers[0], wrong, layers[2])


@pytest.mark.parametrize(
    ("plant", "layer"), [(skipped, 1), (weights_of_another, 2)], ids=["skipped", "weights"]
)
def test_no_pass_is_blamed(
    plant: Callable[[Layers], Layers], layer: int, bench: Callable[..., Bench], tmp_path: Path
) -> None:
    on = bench("fp32")
    exported = planted(on.exported, plant)
    nowhere = cast(Any, None)  # an artifact is what trials are kept for, and none is made
    recompiled = RecompiledArtifact(
        nowhere, exported, Replay(exported), on.store, on.model_dir, dummy=False
    )
    report = export_report(recompiled, on.prompt)
    assert report.problem.startswith(f"layer {layer} differs")
    found = bisect_artifact(recompiled, on.prompt, None, None, None, tmp_path, lambda trial: None)
    assert found.rewrite is None
    assert found.trials == 0
    assert [finding.layer for finding in found.findings] == [layer]
    assert f"layer {layer} only" in found.layers


def test_a_pass_that_first_reads_it_shows_it(bench: Callable[..., Bench], tmp_path: Path) -> None:
    """A variable that weights are named by only from one pass on."""
    on = bench("fp32")
    exported = planted(on.exported, next_norm_of_the_model)
    replay = Replay(exported)
    check = ReferenceCheck(replay, on.store, on.prompt, on.exported)
    found = find_culprit(replay, on.store, on.prompt, check, Log("test"), tmp_path)
    assert found.rewrite is not None
    assert found.rewrite.pass_name == "fuse_add_norm_across_layers"
    assert [finding.layer for finding in found.findings] == [1]
    assert found.layers == "layer 1 only"
