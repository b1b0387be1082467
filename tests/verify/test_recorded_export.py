"""Exported graphs of a recompiled artifact: where they come from, and how they are checked."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dsa_compile.artifact.reader import Artifact
from dsa_compile.artifact.records import Producer
from dsa_compile.frontend import recorded_graphs
from dsa_compile.ir.argument_json import ArgumentError
from dsa_compile.verify import recompiled_artifact
from dsa_compile.verify.recompiled_artifact import RecompiledArtifact


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[list[str] | None]:
    """Names of the graphs that programs are built of; None for an export."""
    calls: list[list[str] | None] = []
    built = recompiled_artifact.build_program

    def build_program(model_dir: Path, config: Any, recorded: Any = None) -> Any:
        calls.append(None if recorded is None else list(recorded))
        return built(model_dir, config, recorded)

    monkeypatch.setattr(recompiled_artifact, "build_program", build_program)
    return calls


def test_bisect_starts_at_the_graphs_that_the_artifact_records(
    artifact: Path, recompiled: RecompiledArtifact, given: list[list[str] | None]
) -> None:
    read = RecompiledArtifact.open(artifact, recorded_export=True)
    assert given == [["embed", "dense", "moe", "head"]]
    assert read.problems() == []  # the passes make the artifact of them
    assert read.replay.count == recompiled.replay.count


def test_what_nothing_compares_is_exported_again(
    artifact: Path, given: list[list[str] | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    RecompiledArtifact.open(artifact, dummy=True, recorded_export=True)
    other = replace(Producer.current(), torch="2.0.0")
    monkeypatch.setattr(Producer, "current", lambda: other)
    RecompiledArtifact.open(artifact, recorded_export=True)
    assert given == [None, None]


def test_a_record_that_cannot_be_read_is_exported_again(
    artifact: Path, given: list[list[str] | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recompiled_artifact, "_recorded_export", lambda artifact: {"embed": {}})
    RecompiledArtifact.open(artifact, recorded_export=True)
    assert given == [["embed"], None]


def test_verify_compares_the_recorded_export_with_a_fresh_one(
    artifact: Path, recompiled: RecompiledArtifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert recompiled.problems() == []
    path = recompiled.artifact.manifest.exported
    assert path is not None
    data = json.loads((artifact / path).read_text(encoding="utf-8"))
    moe = next(graph for graph in data["regions"] if graph["name"] == "moe")
    call = next(node for node in moe["nodes"] if node.get("target") == "aten.pow.Tensor_Scalar")
    call["args"][1] = 3
    monkeypatch.setattr(
        Artifact, "read_json", lambda self, name: data if name == path else json.loads(
            (artifact / name).read_text(encoding="utf-8")
        ),
    )  # fmt: skip
    assert recompiled.problems() == [
        "graph moe as exported is not what exporting the model again gives"
    ]


def test_of_private_ops_those_that_exports_leave_are_read() -> None:
    grouped = torch.ops.aten._grouped_mm.default
    assert recorded_graphs._target("aten._grouped_mm.default") is grouped
    with pytest.raises(ArgumentError, match="not an op of exported graphs"):
        recorded_graphs._target("aten._foobar.default")
