"""Recorded programs as ONNX models: what they compute, and that every stage is a valid model."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

import onnx
import onnx.inliner
import onnxruntime
from onnx import checker

from dsa_compile.cli.inspect.command import main
from dsa_compile.facts.config import CompileConfig
from dsa_compile.frontend.build import build_program
from dsa_compile.inspect.onnx.export import REGIONS, export
from dsa_compile.inspect.onnx.model import whole_step
from dsa_compile.inspect.onnx.schemas import register, schema, signatures
from dsa_compile.inspect.store import Store
from dsa_compile.ir.passes import Pass
from dsa_compile.ir.program import Level
from dsa_compile.ops import REFERENCE
from dsa_compile.passes.pipeline import PIPELINE
from dsa_compile.weights.checkpoint import Checkpoint
from tests.dense_run import run_dense
from tests.weights.loading import load_layer

LOGICAL = "recognize_sparse_attention"
TOPK = 16  # index_topk of the tiny model
DENSE = (LOGICAL, "token_major", "absorb_mla", "flatten_tokens")


@pytest.fixture(scope="module")
def interpreted(tiny: Path) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """Token ids [B, S] and logits [B, S, V] of the LOGICAL program, by length."""
    program = build_program(tiny / "model", CompileConfig(recipe="fp32"))
    for step in PIPELINE[: PIPELINE.index(Level.LOGICAL)]:
        assert isinstance(step, Pass)
        step(program)
    checkpoint = Checkpoint.open(tiny / "model", program.spec, range(2))
    weights = {
        call.vars.get("layer", call.kind): load_layer(
            program.weights, call.kind, call.vars, checkpoint
        )
        for call in program.calls
    }
    found = {}
    for length in (1, TOPK - 1, TOPK, 40):
        ids = torch.randint(0, 256, (2, length), generator=torch.Generator().manual_seed(length))
        batch = {"input_ids": ids, "positions": torch.arange(length).expand(2, -1)}
        found[length] = (
            ids,
            run_dense(
                program, lambda kind, variables: weights[variables.get("layer", kind)], batch
            ),
        )
    return found


@pytest.mark.parametrize("after", DENSE)
def test_onnx_runtime_agrees_with_the_interpreter(
    tiny: Path,
    interpreted: dict[int, tuple[torch.Tensor, torch.Tensor]],
    tmp_path: Path,
    after: str,
) -> None:
    file = tmp_path / "model.onnx"
    command = [str(tiny / "artifact"), "onnx", "--after", after, "-o", str(file), "--weights"]
    assert main(command) == 0
    session = onnxruntime.InferenceSession(file)
    for length, (ids, expected) in interpreted.items():
        positions = torch.arange(length).expand(2, -1)
        flat = len(session.get_inputs()[0].shape) == 1
        rows = [slice(0, 1), slice(1, 2)] if flat else [slice(None)]  # flat: one sequence
        for row in rows:
            batch = {"input_ids": ids[row], "positions": positions[row]}
            fed = {k: np.ascontiguousarray(v[0] if flat else v) for k, v in batch.items()}
            [logits] = session.run(None, fed)
            found = torch.from_numpy(logits).view_as(expected[row])
            torch.testing.assert_close(found, expected[row], rtol=1e-4, atol=1e-4)


def models(artifact: Path) -> Iterator[tuple[str, onnx.ModelProto]]:
    store = Store.open(artifact)
    for stage in store.stages:
        split = any(graph.variant for graph in stage.graphs.values())
        for variant in ("long", "short") if split else ("long",):
            model = export(whole_step(store, stage.graphs, variant), stage.name)
            register(model)
            yield stage.name, model


@pytest.mark.slow
@pytest.mark.parametrize("fixture", ["tiny", "published"])
def test_every_stage_is_a_valid_model(fixture: str, request: pytest.FixtureRequest) -> None:
    path = request.getfixturevalue(fixture)
    for name, model in models(path / "artifact" if fixture == "tiny" else path):
        # types can be inferred through standard ops only
        checker.check_model(model, full_check=name in DENSE)


def test_the_logical_level_is_made_of_standard_ops(tiny: Path) -> None:
    store = Store.open(tiny / "artifact")
    model = export(whole_step(store, store.stage(LOGICAL).graphs, "long"), "logical")
    flat = onnx.inliner.inline_local_functions(model)
    assert {node.domain for node in flat.graph.node} == {""}


def test_the_checker_knows_the_ops(published: Path) -> None:
    """A call that the schemas forbid is refused: they are in force."""
    store = Store.open(published)
    model = export(whole_step(store, store.stages[-1].graphs, "long"), "final")
    register(model)
    for function in model.functions:
        for node in function.node:
            if node.op_type == "paged_index_topk_fp8":
                del node.input[-1]
    with pytest.raises(checker.ValidationError, match="paged_index_topk_fp8"):
        checker.check_model(model)


def test_schemas_follow_the_ops() -> None:
    for op in REFERENCE:
        arguments = op._schema.arguments
        name = str(op).split(".")[1]
        known = schema("dsa", name)
        inputs = [item.name for item in known.inputs]
        assert sorted([*inputs, *known.attributes]) == sorted(a.name for a in arguments)
        written = [a.name for a in arguments if a.alias_info and a.alias_info.is_write]
        assert len(known.outputs) == len(op._schema.returns) + len(written)
        assert signatures()[name].overload is op


def test_calls_say_where_they_come_from_and_where_they_run(published: Path) -> None:
    store = Store.open(published)
    stage = store.stages[-1]
    model = export(whole_step(store, stage.graphs, "long"), "final")
    [moe] = [function for function in model.functions if function.name == "moe_long"]
    notes = {n.name: {note.key: note.value for note in n.metadata_props} for n in moe.node}
    for node in stage.graphs["moe.long"].calls:
        if node.name in notes:
            assert notes[node.name].get("origin", "") == node.origin
            assert notes[node.name].get("path", "") == node.path
    assert {note["stream"] for note in notes.values() if "stream" in note} == {"1"}


def test_caches_come_out_written(tiny: Path) -> None:
    store = Store.open(tiny / "artifact")
    model = export(whole_step(store, store.stages[-1].graphs, "short"), "final")
    caches = [f"model.layers.{n}.{c}_cache" for n in range(2) for c in ("latent", "index")]
    assert set(caches) <= {value.name for value in model.graph.input}
    assert {f"{name}.written" for name in caches} <= {value.name for value in model.graph.output}
    [moe] = [function for function in model.functions if function.name == "moe_short"]
    reads = [node for node in moe.node if node.op_type == "paged_latent_attention"]
    writes = [node for node in moe.node if node.op_type == "write_latent_cache"]
    assert set(reads[0].input) & set(writes[0].output), "attention must read what was written"


def test_a_layer_alone(tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "layer.onnx"
    command = [str(tiny / "artifact"), "onnx", "--layer", "1", "--after", LOGICAL]
    assert main([*command, "-o", str(file)]) == 0
    model = onnx.load(file)
    checker.check_model(model)
    assert [n.op_type for n in model.graph.node if n.domain == REGIONS] == ["moe"]
    names = {value.name for value in model.graph.input}
    assert {"hidden", "cos", "model.layers.1.mlp.gate.weight"} <= names


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--after", "recognise_linear"], "did you mean 'recognize_linear'"),
        (["--region", "mo"], "unknown region 'mo'"),
        (["--layer", "7"], "no layer 7"),
        (["--after", "0", "--weights", "--model-dir", "/nowhere"], "/nowhere"),
        (["--after", "merge_projections", "--weights"], "exists only between two passes"),
        (["-o", "/nowhere/model.onnx"], "is not a directory; create it first"),
    ],
)
def test_what_is_wrong_is_said(
    tiny: Path, capsys: pytest.CaptureFixture[str], options: list[str], complaint: str
) -> None:
    file = tiny / "refused.onnx"
    assert main([str(tiny / "artifact"), "onnx", "-o", str(file), *options]) == 2
    error = capsys.readouterr().err
    assert complaint in error
    assert error.count("\n") == 1
    assert not [*tiny.glob("refused.onnx*")]
