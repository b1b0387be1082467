"""Measures of a model whose indexer rotates neighbours and whose layers reuse selections."""

from pathlib import Path

import pytest

from dsa_compile.lowering.compile_model import compile_model
from dsa_compile.measure.eval.indexer_overlap import measure_overlap, references
from dsa_compile.measure.eval.loaded_artifact import LoadedArtifact
from examples.small_models.models import save_hf, tiny_glm_config, tiny_model


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("glm") / "model"
    config = tiny_glm_config(4, first_k_dense_replace=0)  # the last two reuse the second's
    save_hf(tiny_model(config), path)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["fp32", "fp8"])
def test_every_layer_is_judged_by_the_indexer_whose_keys_it_attends_to(
    model_dir: Path, recipe: str, tmp_path: Path
) -> None:
    compile_model(model_dir, tmp_path / "artifact", recipe=recipe, block_size=16, records=False)
    loaded = LoadedArtifact.open(tmp_path / "artifact")
    indexers = references(loaded)
    assert [indexer.layer for indexer in indexers.values()] == [0, 1, 1, 1]
    sequences = {48: [list(range(3, 51))]}
    least = {}
    for selection in ("sparse", "interleaved"):
        runner = loaded.runner(selection, max_tokens=48)
        rows = measure_overlap(runner, indexers, sequences, loaded.spec.index_topk, selection)
        assert [row.layer for row in rows] == [0, 1, 2, 3]
        assert len({row.mean for row in rows[1:]}) == 1  # one selection, handed on
        least[selection] = min(row.mean for row in rows)
    # the model's rotation gives the reference's keys; the other layout of pairs does not
    assert least["sparse"] >= (1.0 if recipe == "fp32" else 0.85)
    assert least["interleaved"] < 0.8
