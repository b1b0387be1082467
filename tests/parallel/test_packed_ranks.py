"""Packed weights of several ranks: each rank's parts in files of their own, the rest once."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dsa_compile.artifact.reader import Artifact
from dsa_compile.lowering.compile_model import compile_model
from dsa_compile.runtime.loading.weight_loading import load_weights
from dsa_compile.verify.recompiled_artifact import RecompiledArtifact
from tests.trained import trained_model

from .conftest import LAYOUTS


@pytest.mark.slow
def test_ranks_read_what_they_read_of_the_checkpoint(
    artifact: Callable[[str], Path], tmp_path: Path
) -> None:
    path = tmp_path / "packed"
    compile_model(
        trained_model(), path, target="cpu", block_size=16, weights="pack", layout=LAYOUTS["ep2"],
        records=False,
    )  # fmt: skip
    packed, wanted = Artifact.open(path), Artifact.open(artifact("ep2"))
    held = 0
    for rank in range(2):
        ours, theirs = (load_weights(opened, None, rank=rank) for opened in (packed, wanted))
        assert ours.keys() == theirs.keys()
        for call, weights in theirs.items():
            assert ours[call].keys() == weights.keys()
            for key, weight in weights.items():
                assert torch.equal(ours[call][key], weight), (call, key)
                held += weight.nbytes
    names = {file.name for file in packed.manifest.weights.files}
    assert {
        "layer_003.safetensors",
        "layer_003.tp0.safetensors",
        "layer_003.tp1.safetensors",
    } <= names
    assert sum(file.size for file in packed.manifest.weights.files) < held
    assert list(RecompiledArtifact.open(path, trained_model()).packed_weight_problems()) == []
