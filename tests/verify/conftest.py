"""A small model and its artifact, looked at by several tests of this area."""

from pathlib import Path

import pytest

from dsa_compile.lowering.compile_model import compile_model
from dsa_compile.verify.recompiled_artifact import RecompiledArtifact
from examples.small_models.models import save_hf, save_hub, tiny_config, tiny_model


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense layer and an MoE layer."""
    folder = tmp_path_factory.mktemp("model")
    save_hf(tiny_model(tiny_config(2, first_k_dense_replace=1)), folder)
    return folder


@pytest.fixture(scope="session")
def artifact(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In fp32, with small pages."""
    path = tmp_path_factory.mktemp("out") / "artifact"
    compile_model(model_dir, path, block_size=16)
    return path


@pytest.fixture(scope="session")
def recompiled(artifact: Path) -> RecompiledArtifact:
    """The artifact, its passes run again."""
    return RecompiledArtifact.open(artifact)


@pytest.fixture(scope="session")
def drafting(tmp_path_factory: pytest.TempPathFactory) -> RecompiledArtifact:
    """A dense layer, an MoE layer and one that drafts."""
    model, path = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("out") / "mtp"
    save_hub(tiny_model(tiny_config(2, first_k_dense_replace=1)), model, fp8=False)
    compile_model(model, path, draft="mtp", block_size=16, records=False)
    return RecompiledArtifact.open(path)
