from pathlib import Path

import pytest

from tests.artifact.building import build, save_model


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return save_model(tmp_path / "model")


@pytest.fixture
def artifact_dir(tmp_path: Path, model_dir: Path) -> Path:
    build(tmp_path / "artifact", model_dir)
    return tmp_path / "artifact"


@pytest.fixture
def packed_dir(tmp_path: Path, model_dir: Path) -> Path:
    build(tmp_path / "packed", model_dir, mode="pack")
    return tmp_path / "packed"
