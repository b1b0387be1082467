"""A frontend that looks for other parameters than transformers' model has blames no download."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from dsa_compile.errors import CheckpointError, CompileError
from dsa_compile.frontend.build import load_spec
from dsa_compile.frontend.reference import wrong_parameter
from dsa_compile.lowering.compile_model import compile_model
from dsa_compile.verify.recompiled_artifact import ExportedArtifact
from dsa_compile.weights import canonical
from examples.small_models.models import (
    hub_config,
    save_hf,
    tiny_axk2_config,
    tiny_config,
    tiny_glm_config,
    tiny_model,
)

ATTENTION = canonical._attention


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("frontend") / "model"
    save_hf(tiny_model(tiny_config(3)), path)
    return path


@pytest.mark.parametrize("config", [tiny_config, tiny_glm_config, tiny_axk2_config])
def test_every_family_has_the_parameters_of_transformers(tmp_path: Path, config) -> None:
    (tmp_path / "config.json").write_text(json.dumps(hub_config(config(6), mtp=True)))
    assert not wrong_parameter(tmp_path, load_spec(tmp_path), range(7))


def another_name(spec, kind):
    return ((name.replace("q_a_proj", "q_proj"), shape) for name, shape in ATTENTION(spec, kind))


def another_shape(spec, kind):
    return ((name, shape[::-1]) for name, shape in ATTENTION(spec, kind))


@pytest.mark.parametrize(
    ("fault", "said"),
    [(another_name, "has none of that name"), (another_shape, "has it as [48, 128]")],
)
def test_the_frontend_is_named(model_dir, tmp_path, monkeypatch, fault, said) -> None:
    artifact = tmp_path / "artifact"
    compile_model(model_dir, artifact, stop_after="functionalize")
    monkeypatch.setattr(canonical, "_attention", fault)
    with pytest.raises(CompileError, match="a fault of the frontend, not of the weights") as found:
        compile_model(model_dir, tmp_path / "again")
    assert said in str(found.value)
    with pytest.raises(CompileError, match="a fault of the frontend"):
        ExportedArtifact.open(artifact, recorded_export=True).recompiled()


def test_an_incomplete_download_is_still_that(model_dir, tmp_path) -> None:
    (tmp_path / "config.json").write_text((model_dir / "config.json").read_text())
    tensors = load_file(model_dir / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="is the download complete"):
        compile_model(tmp_path, tmp_path / "artifact")
