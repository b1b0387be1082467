"""A graph that could go wrong on a GPU is refused when it is read."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dsa_compile.artifact import Artifact
from dsa_compile.errors import ArtifactError
from tests.artifact.building import build, forge

GRAPH = "graphs/dense.json"


def stream_op(name: str, number: int) -> dict[str, Any]:
    target = f"dsa.{name}.default"
    return {"op": "call_function", "name": f"{name}_{number}", "target": target, "args": [number]}


def edit(artifact: Path, change: Callable[[list[Any]], object]) -> None:
    """Change the nodes of a graph; its last two are a call and the output."""
    data = json.loads((artifact / GRAPH).read_text())
    change(data["nodes"])
    forge(artifact, GRAPH, json.dumps(data).encode())


def test_a_call_that_nothing_joins(tmp_path: Path, model_dir: Path) -> None:
    build(tmp_path / "a", model_dir)
    edit(tmp_path / "a", lambda nodes: nodes.insert(-2, stream_op("on_stream", 1)))
    says = r"graphs/dense\.json: dense: not joined: .*; add on_stream\(0\) at the end; or recompile"
    with pytest.raises(ArtifactError, match=says):
        Artifact.open(tmp_path / "a").region("dense")


def test_events_that_are_sound_are_read(tmp_path: Path, model_dir: Path) -> None:
    build(tmp_path / "a", model_dir)
    ops = [stream_op("record_event", 3), stream_op("wait_event", 3)]
    edit(tmp_path / "a", lambda nodes: nodes.__setitem__(slice(-2, -2), ops))
    names = [node.name for node in Artifact.open(tmp_path / "a").region("dense").graph.nodes]
    assert {"record_event_3", "wait_event_3"} <= set(names)


def test_a_stream_that_is_no_number(tmp_path: Path, model_dir: Path) -> None:
    build(tmp_path / "a", model_dir)
    bad = {**stream_op("on_stream", 1), "args": ["1"]}
    edit(tmp_path / "a", lambda nodes: nodes.insert(-2, bad))
    with pytest.raises(ArtifactError, match="argument 'stream' should be int"):
        Artifact.open(tmp_path / "a").region("dense")
