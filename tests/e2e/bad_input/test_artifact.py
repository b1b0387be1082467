"""Artifacts that are damaged, forged, of other versions or of other models."""

import json
import shutil
from typing import Any

import pytest

from dsa_compile.artifact.manifest import FORMAT_VERSION
from dsa_compile.cli import compile as compile_cli
from examples.small_models.models import save_hf, tiny_config, tiny_model
from tests.artifact.building import edit_manifest, forge
from tests.e2e.bad_input.damage import NORM, edit_shard


@pytest.mark.parametrize(
    "name",
    ["manifest.json", "graphs/dense.long.json", "weights/plan.json", "weights/head.safetensors"],
)
def test_an_edited_file(artifact, refusal, name):
    path = artifact / name
    data = bytearray(path.read_bytes())
    data[-20] ^= 1
    path.write_bytes(data)
    assert str(path) in refusal.generating(artifact)


def test_a_missing_file(artifact, refusal):
    (artifact / "weights/head.safetensors").unlink()
    assert "head.safetensors: missing" in refusal.generating(artifact)


def test_another_version(artifact, refusal):
    edit_manifest(artifact, lambda data: data.update(format_version=99))
    said = refusal.generating(artifact)
    assert f"format version 99, this dsa-compile reads {FORMAT_VERSION}" in said


@pytest.mark.parametrize("path", ["../../etc/passwd", "/etc/passwd", "weights/../../x"])
@pytest.mark.parametrize("place", ["files", "weights", "plan", "tokenizer"])
def test_a_manifest_that_leaves_its_directory(artifact, refusal, place, path):
    def edit(data: dict[str, Any]) -> None:
        if place == "files":
            data["files"][0]["path"] = path
        elif place == "weights":
            data["weights"]["files"][0]["name"] = path
        elif place == "plan":
            data["weights"]["plan"] = path
        else:
            data["tokenizer"] = [path]

    edit_manifest(artifact, edit)
    message = refusal.generating(artifact)
    assert "manifest.json" in message
    assert "the file was edited, recompile" in message


@pytest.mark.parametrize("op", ["aten.set_.source_Tensor", "dsa.shell.default", "os.system"])
def test_a_graph_with_an_op_outside_the_whitelist(artifact, refusal, op):
    name = "graphs/head.json"
    text = (artifact / name).read_text()
    edited = text.replace("dsa.linear.default", op)
    assert edited != text
    forge(artifact, name, edited.encode())
    assert op in refusal.generating(artifact)


@pytest.mark.parametrize(
    "edit",
    [
        lambda plan: plan["head"].clear(),
        lambda plan: plan.pop("dense"),
        lambda plan: plan["head"].update(extra=7),
        lambda plan: plan["head"]["lm_head.weight"].update(shape=[64]),
        lambda plan: plan["head"]["lm_head.weight"].update(dtype="bfloat16"),
    ],
)
def test_a_forged_plan(artifact, refusal, edit):
    plan = json.loads((artifact / "weights/plan.json").read_text())
    edit(plan)
    forge(artifact, "weights/plan.json", json.dumps(plan).encode())
    refusal.generating(artifact)


def test_artifacts_to_read_are_not_run(source, quick, tmp_path, refusal):
    for options, what in (
        (["--weights", "none"], "compiled with --weights none, it holds graphs only"),
        (["--stop-after", "absorb_mla"], "compiled with --stop-after absorb_mla"),
    ):
        out = tmp_path / options[-1]
        command = [str(source), "-o", str(out), "--block-size", "16", "--quiet", *options]
        assert compile_cli.main(command) == 0
        assert what in refusal.generating(out)


def test_what_is_no_artifact(tmp_path, refusal):
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    assert "file: not a directory" in refusal.generating(tmp_path / "file")
    assert "no such directory" in refusal.generating(tmp_path / "absent")
    assert "manifest.json: missing; is this an artifact?" in refusal.generating(tmp_path / "empty")


def test_a_tokenizer_that_is_none(artifact, refusal):
    forge(artifact, "tokenizer/tokenizer.json", b'{"model": 3}')
    assert "tokenizer.json: not a tokenizer" in refusal.generating(artifact)


def test_a_tokenizer_that_was_put_there(artifact, refusal, tmp_path):
    name = "tokenizer/tokenizer.json"
    (artifact / name).rename(tmp_path / "theirs.json")
    (artifact / name).symlink_to(tmp_path / "theirs.json")
    assert f"{name}: missing, or not a file inside" in refusal.generating(artifact)

    def unlist(data: dict[str, Any]) -> None:
        data["tokenizer"].remove(name)
        data["files"] = [file for file in data["files"] if file["path"] != name]

    edit_manifest(artifact, unlist)
    assert f"{name}: not part of the artifact" in refusal.generating(artifact)


# The model that an artifact refers to.


def test_another_model(compiled, model, source, refusal):
    other = tiny_model(
        tiny_config(2, first_k_dense_replace=1, n_routed_experts=8, max_position_embeddings=256),
        seed=1,
    )
    shutil.rmtree(model)
    save_hf(other, model, max_shard_size="300KB")
    command = ("--prompt-ids", "5", "--model-dir", str(model))
    message = refusal.generating(compiled / "reference", *command)
    assert str(model) in message
    assert "not the content that was compiled" in message


def test_a_model_in_other_files(compiled, model, source, refusal):
    for path in model.glob("*.safetensors"):
        path.unlink()
    message = refusal.generating(
        compiled / "reference", "--prompt-ids", "5", "--model-dir", str(model)
    )
    assert "cannot be read (No such file or directory)" in message


def test_a_model_changed_after_it_was_compiled(model, quick, tmp_path, refusal):
    out = tmp_path / "out"
    assert compile_cli.main([str(model), "-o", str(out), "--block-size", "16", "--quiet"]) == 0
    path = edit_shard(model, NORM, lambda t: t[NORM].add_(1))
    message = refusal.generating(out)
    assert f"{path}: not the content that was compiled" in message
    shutil.rmtree(model)
    assert "say where the model is now (--model-dir)" in refusal.generating(out)


def test_a_model_for_an_artifact_that_needs_none(artifact, model, refusal):
    message = refusal.generating(artifact, "--prompt-ids", "5", "--model-dir", str(model))
    assert "leave out --model-dir" in message
