"""A small model and its artifact, looked at by several tests of this area."""

from pathlib import Path

import pytest

from dsa_compile.lowering.compile_model import compile_model
from dsa_compile.testing.models import save_hf, tiny_config, tiny_model
from dsa_compile.verify.recompiled_artifact import RecompiledArtifact


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
