"""Reading the records of an artifact, and refusing what is no record."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from dsa_compile.errors import ArtifactError, UserError
from dsa_compile.facts.config import CompileConfig
from dsa_compile.inspect.listing import odd_layers
from dsa_compile.inspect.store import Store, ranges, unknown
from dsa_compile.ir.graph import graph_from_json
from dsa_compile.ir.plan import MODEL, Call, Plan
from dsa_compile.lowering.compile_model import compile_model
from dsa_compile.passes.manager import pass_names


@pytest.fixture
def copied(tiny: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny / "artifact", tmp_path / "artifact"))


def test_a_stage_a_pass(tiny: Path) -> None:
    store = Store.open(tiny / "artifact")
    assert [stage.name for stage in store.stages] == ["export", *pass_names(config=CompileConfig())]
    for stage in store.stages[1:]:
        assert stage.summary is not None
        nodes = sum(
            len(graph.calls)
            for graph in stage.graphs.values()
            if graph.variant in ("", "long")  # one step runs one variant; each layer kind once here
        )
        assert nodes == stage.summary.nodes_after, stage.name
        numbers = [site.number for site in stage.sites]
        assert numbers == list(range(1, len(numbers) + 1))


def test_the_last_stage_is_the_finished_program(tiny: Path) -> None:
    store = Store.open(tiny / "artifact")
    last = store.stages[-1].graphs
    assert set(last) == set(store.final)
    for name, graph in store.final.items():
        stored = [node.was or node.name for node in graph.nodes.values()]
        assert stored == [node.name for node in last[name].nodes.values()]
        assert [node.target for node in graph.calls] == [node.target for node in last[name].calls]


def test_every_exported_call_has_a_line_of_the_reference(tiny: Path) -> None:
    graphs = Store.open(tiny / "artifact").stages[0].graphs.values()
    calls = [node for graph in graphs for node in graph.calls]
    without = {node.target for node in calls if not node.source}
    assert without <= {"aten.sym_size.int"}  # sizes of inputs that no line reads
    files = {node.source.rpartition(":")[0] for node in calls if node.source}
    assert "transformers/models/deepseek_v32/modeling_deepseek_v32.py" in files
    assert all(file.startswith(("transformers/", "dsa_compile/frontend/")) for file in files)


def test_passes_are_named_by_name_or_number(tiny: Path) -> None:
    store = Store.open(tiny / "artifact")
    stage = store.stage("recognize_swiglu")
    assert store.stage(str(stage.number)) is stage
    assert store.stage(f"{stage.number}_recognize_swiglu") is stage
    assert store.stage("export") is store.stage("0") is store.stages[0]
    with pytest.raises(UserError, match="unknown pass 'recognise_swiglu'; did you mean 'recognize"):
        store.stage("recognise_swiglu")
    with pytest.raises(UserError, match="unknown pass '99'"):
        store.stage("99")
    with pytest.raises(UserError, match="unknown pass '1_recognize_swiglu'"):
        store.stage("1_recognize_swiglu")


def test_unknown_layers_name_the_nearest(tiny: Path) -> None:
    store = Store.open(tiny / "artifact")
    assert store.layer(1).kind == "moe"
    with pytest.raises(UserError, match=r"no layer 7 in .* \(layers 0-1\); the nearest is 1"):
        store.layer(7)


def test_without_records(tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "bare"
    compile_model(tiny / "model", out, recipe="fp32", records=False, weights="none")
    store = Store.open(out)
    assert not store.has_records
    assert len(store.final) == 11  # finished graphs are not records
    with pytest.raises(ArtifactError, match=r"compiled with --no-records.*recompile"):
        _ = store.stages


Damage = Callable[[Path], object]
DAMAGES: dict[str, tuple[Damage, str]] = {
    "no artifact": (lambda path: shutil.rmtree(path), "no such directory"),
    "no manifest": (lambda path: (path / "manifest.json").unlink(), "manifest.json: missing"),
    "manifest cut": (
        lambda path: (path / "manifest.json").write_text('{"format_version": 4'),
        "not valid JSON",
    ),
    "manifest edited": (
        lambda path: (path / "manifest.json").write_text(
            (path / "manifest.json").read_text().replace('"cpu"', '"gpu"', 1)
        ),
        "digest does not match",
    ),
    "record edited": (
        lambda path: (path / "passes/06_recognize_rms_norm/graphs.json").write_text("{}"),
        "graphs.json: not the content that was compiled",
    ),
    "record gone": (
        lambda path: (path / "passes/06_recognize_rms_norm/graphs.json").unlink(),
        "graphs.json: missing",
    ),
    "graph gone": (lambda path: (path / "graphs/head.json").unlink(), "head.json: missing"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_told(copied: Path, damage: str) -> None:
    harm, says = DAMAGES[damage]
    harm(copied)
    with pytest.raises(ArtifactError, match=says):
        _ = [stage.graphs for stage in Store.open(copied).stages], Store.open(copied).final


GRAPH = {"name": "g", "outputs": ["y"], "nodes": [
    {"op": "placeholder", "name": "x", "role": "value", "key": "x"},
    {"op": "call_function", "name": "f", "target": "aten.neg.default", "args": [{"n": "x"}]},
    {"op": "output", "name": "output", "args": [{"tuple": [{"n": "f"}]}]},
]}  # fmt: skip


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (lambda nodes: nodes.reverse(), "node output: no earlier node 'f'"),
        (lambda nodes: nodes[1].update(name="x"), "node x: a node of that name exists already"),
        (lambda nodes: nodes[1].update(args=[{"n": "z"}]), "node f: no earlier node 'z'"),
        (lambda nodes: nodes[1].update(args=[{"n": None}]), "no earlier node None"),
        (lambda nodes: nodes[2].update(args=[]), "must return one tuple of tensors"),
        (lambda nodes: nodes[1].update(args="x"), "args must be a list"),
        (lambda nodes: nodes[1].update(path=3), "its path is not a short line of text"),
        (lambda nodes: nodes[1].update(path="\x1b[2J"), "its path is not a short line"),
        (lambda nodes: nodes[1].pop("name"), "node #1: its name is not an identifier"),
        (lambda nodes: nodes.append("node"), "node #3: comes after the output"),
        (lambda nodes: nodes.insert(1, "node"), "node #1: is not an object"),
    ],
)
def test_what_is_no_graph_is_refused(edit: Callable[[list[object]], object], says: str) -> None:
    data = json.loads(json.dumps(GRAPH))
    assert graph_from_json(data, "file").results == ("f",)
    edit(data["nodes"])
    with pytest.raises(ArtifactError, match=says):
        graph_from_json(data, "file")


def test_an_argument_that_is_called_n_refers_to_no_node() -> None:
    data = json.loads(json.dumps(GRAPH))
    data["nodes"][1]["kwargs"] = {"n": 2}
    assert graph_from_json(data, "file").nodes["f"].inputs == ("x",)


def test_ranges_and_suggestions() -> None:
    assert ranges([5, 0, 2, 1]) == "0-2, 5"
    assert ranges([]) == ""
    assert unknown("kind", "mo", ["moe", "dense"]) == "unknown kind 'mo'; did you mean 'moe'?"
    assert unknown("kind", "zzz", ["moe"]) == "unknown kind 'zzz'; choose one of moe"


def test_nothing_of_it_needs_torch() -> None:
    names = "compare diff fold lanes lineage listing measured near_miss pairing select source"
    modules = [f"dsa_compile.inspect.{n}" for n in f"{names} store times why".split()]
    modules += ["dsa_compile.ir.graph", "dsa_compile.ir.listing"]
    code = f"import sys, {', '.join(modules)}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_a_layer_that_takes_the_weights_of_another(tiny: Path) -> None:
    store = Store.open(tiny / "artifact")
    layers = [
        Call(
            f"layer_{n:03d}",
            "moe",
            {"layer": f"model.layers.{n}", "next": f"model.layers.{n + 1}.norm"},
            caches=None,
            layer=n,
        )
        for n in range(40)
    ]
    manifest = replace(store.manifest, plans={MODEL: Plan(tuple(layers), ("hidden",))})
    assert odd_layers(Store(store.path, manifest)) == []
    layers[37] = replace(layers[37], vars={**layers[37].vars, "layer": "model.layers.36"})
    manifest = replace(store.manifest, plans={MODEL: Plan(tuple(layers), ("hidden",))})
    assert odd_layers(Store(store.path, manifest)) == [(37, "layer", "model.layers.36")]
