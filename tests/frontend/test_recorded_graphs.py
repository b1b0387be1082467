"""Graphs read back from records, in place of another export."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from dsa_compile.errors import ArtifactError
from dsa_compile.facts.config import CompileConfig
from dsa_compile.frontend.build import build_program
from dsa_compile.ir.dims import FakeWorld, size_name
from dsa_compile.ir.graph_json import region_to_json
from dsa_compile.ir.program import Program
from examples.small_models.models import save_hf, tiny_config, tiny_model

CONFIG = CompileConfig(weights="none", records=False)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_hf(tiny_model(tiny_config(2, first_k_dense_replace=1)), folder)
    return folder


@pytest.fixture(scope="module")
def exported(model_dir: Path) -> Program:
    return build_program(model_dir, CONFIG)


@pytest.fixture
def recorded(exported: Program) -> dict[str, Any]:
    text = json.dumps({name: region_to_json(region) for name, region in exported.regions.items()})
    data: dict[str, Any] = json.loads(text)
    return data


def _types(program: Program) -> list[Any]:
    found = []
    for region in program.regions.values():
        for node in region.graph.nodes:
            value = node.meta.get("val")
            strides = [size_name(s) for s in value.stride()] if hasattr(value, "stride") else None
            notes = {key: note for key, note in node.meta.items() if key != "val"}
            found.append((node.name, node.target, str(node.args), str(node.kwargs), strides, notes))
    return found


def test_recorded_graphs_are_those_of_another_export(
    model_dir: Path, exported: Program, recorded: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsa_compile.frontend.build.export_region", None)  # nothing is traced
    read = build_program(model_dir, CONFIG, recorded)
    assert _types(read) == _types(exported)
    assert [r.outputs for r in read.regions.values()] == [
        r.outputs for r in exported.regions.values()
    ]
    assert read.weights == exported.weights
    assert read.plans == exported.plans


def _call(graph: dict[str, Any], target: str) -> dict[str, Any]:
    found: dict[str, Any] = next(n for n in graph["nodes"] if n.get("target") == target)
    return found


@pytest.mark.parametrize(
    "change",
    [
        lambda n: n.update(target="aten.from_file.default", args=["/etc/hostname"]),
        lambda n: n.update(target="operator.attrgetter"),
        lambda n: n.update(target="torch.load"),
        lambda n: n.update(target="os.system.default", args=["true"]),
        lambda n: n["val"].update(dtype="float64"),
        lambda n: n.update(args=[{"n": "nowhere"}]),
    ],
    ids=["reads-a-file", "function", "torch", "library", "type", "node"],
)
def test_a_damaged_graph_is_refused(recorded: dict[str, Any], change: Any) -> None:
    from dsa_compile.frontend.recorded_graphs import read_graph

    embed = copy.deepcopy(recorded["embed"])
    change(_call(embed, "aten.embedding.default"))
    with pytest.raises(ArtifactError, match="recompile"):
        read_graph(embed, FakeWorld())


def test_graphs_of_another_model_are_refused(model_dir: Path, recorded: dict[str, Any]) -> None:
    del recorded["moe"]
    with pytest.raises(ArtifactError, match="not embed, dense, moe, head"):
        build_program(model_dir, CONFIG, recorded)
