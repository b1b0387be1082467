"""Kernels of a Hopper GPU against the references of their ops, all that an artifact binds."""

from pathlib import Path
from typing import Any

import pytest

from dsa_compile.lowering.compile_model import compile_model
from dsa_compile.measure.step.released import write_released
from dsa_compile.verify.checks.kernel_check import KernelReport, check_kernels
from dsa_compile.verify.inputs.prompt import Prompt, random_tokens
from dsa_compile.verify.recompiled_artifact import RecompiledArtifact
from dsa_compile.weights.dummy import DummyWeights
from examples.small_models.models import save_hf, tiny_config, tiny_model

pytestmark = pytest.mark.gpu(capability=(9, 0))
RECIPES = ["bf16", "fp8", "fp8-kv-tensor"]


def checked(recompiled: RecompiledArtifact, source: Any, tokens: int) -> list[KernelReport]:
    """Every call of every layer."""
    manifest, spec = recompiled.artifact.manifest, recompiled.exported.spec
    prompt = Prompt.of(random_tokens(tokens, spec.vocab_size), spec.index_topk, manifest.block_size)
    program = recompiled.replay.final
    return list(check_kernels(program, manifest.kernels, manifest.target, source, prompt))


@pytest.mark.parametrize("recipe", ["fp32", "bf16"])
def test_a_small_model(recipe: str, tmp_path: Path) -> None:
    """Two layers whose widths some kernel takes."""
    folder = tmp_path / "model"
    folder.mkdir()
    save_hf(tiny_model(tiny_config(2, first_k_dense_replace=1)), folder)
    path = tmp_path / "artifact"
    compile_model(folder, path, recipe=recipe, target="sm_90a", block_size=64, records=False)
    recompiled = RecompiledArtifact.open(path)
    found = checked(recompiled, recompiled.store.source, 99)
    assert [f"{report}: {report.problem}" for report in found if report.problem] == []
    assert {report.layer for report in found} == {"embed", 0, 1, "head"}


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_released_layers(recipe: str, tmp_path: Path) -> None:
    """A dense and an MoE layer, random weights, contexts below, at and above 2,048."""
    folder, path = tmp_path / "model", tmp_path / "artifact"
    folder.mkdir()
    compile_model(
        write_released(folder), path, recipe=recipe, target="sm_90a", layers=(2, 3),
        weights="none", records=False,
    )  # fmt: skip
    recompiled = RecompiledArtifact.open(path, folder, dummy=True)
    found = checked(recompiled, DummyWeights(), 3075)
    assert [f"{report}: {report.problem}" for report in found if report.problem] == []
