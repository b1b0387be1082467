"""Faults that no pass is to blame for: of one layer's plan, found by comparing with transformers."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from dsa_compile.compiling import compile_model
from dsa_compile.debugging.asking import ask
from dsa_compile.debugging.reference import export_report
from dsa_compile.debugging.subject import Subject
from dsa_compile.frontend import build
from dsa_compile.ir.program import LayerEntry
from dsa_compile.testing.models import save_hf, tiny_config, tiny_model

Layers = tuple[LayerEntry, ...]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense layer and two MoE layers."""
    folder = tmp_path_factory.mktemp("model")
    save_hf(tiny_model(tiny_config(3, first_k_dense_replace=1)), folder)
    return folder


def skipped(layers: Layers) -> Layers:
    return tuple(entry for entry in layers if entry.index != 1)


def weights_of_another(layers: Layers) -> Layers:
    wrong = replace(layers[2], vars={**layers[2].vars, "layer": "model.layers.1"})
    return (*layers[:2], wrong)


@pytest.mark.parametrize(
    ("plant", "layer"), [(skipped, 1), (weights_of_another, 2)], ids=["skipped", "weights"]
)
def test_a_layer_is_named(
    plant: Callable[[Layers], Layers],
    layer: int,
    model_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = build.layer_plan
    monkeypatch.setattr(build, "layer_plan", lambda spec, keep: plant(whole(spec, keep)))
    artifact = tmp_path / "artifact"
    compile_model(model_dir, artifact, records=False, block_size=16)
    subject = Subject.open(artifact)
    prompt = subject.prompt(tokens=27)
    report = export_report(subject, prompt)
    assert report.problem.startswith(f"layer {layer} differs")
    found = ask(subject, prompt, None, None, None, tmp_path / "out", lambda trial: None)
    assert found.rewrite is None
    assert found.trials == 0
    assert [finding.layer for finding in found.findings] == [layer]
    assert f"layer {layer} only" in found.layers


def test_the_next_norm_of_one_layer(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A variable that weights are named by only from one pass on: that pass shows it."""
    whole = build.layer_plan

    def plan(spec: build.ModelSpec, keep: tuple[int, int] | None) -> Layers:
        layers = whole(spec, keep)
        wrong = {**layers[1].vars, "next_norm": "model.norm"}
        return (layers[0], replace(layers[1], vars=wrong), layers[2])

    monkeypatch.setattr(build, "layer_plan", plan)
    artifact = tmp_path / "artifact"
    compile_model(model_dir, artifact, records=False, block_size=16)
    subject = Subject.open(artifact)
    prompt = subject.prompt(tokens=27)
    found = ask(subject, prompt, None, None, 1e-5, tmp_path / "out", lambda trial: None)
    assert found.rewrite is not None
    assert found.rewrite.pass_name == "fuse_add_norm_across_layers"
    assert [finding.layer for finding in found.findings] == [1]
    assert found.layers == "layer 1 only"
