"""Loss by the FP8 recipes of a model that has learned something."""

import pytest

from dsa_compile.facts.formats import E4M3_MATRIX, recipes_with
from dsa_compile.lowering.compile_model import compile_model
from dsa_compile.measure.eval.indexer_overlap import measure_overlap, references
from dsa_compile.measure.eval.loaded_artifact import LoadedArtifact
from dsa_compile.measure.eval.material import make_material
from dsa_compile.measure.eval.options import Options
from dsa_compile.measure.eval.perplexity import measure_perplexity
from dsa_compile.measure.eval.recall_accuracy import measure_recall
from tests.trained import trained_model

RECIPES = ("fp32", *recipes_with({"weights": E4M3_MATRIX}))
# The rotary key in e4m3 is what the smaller rows cost this model: all scales from 0.25 to 4 agree.
PERPLEXITY = {"fp8": 0.01, "fp8-kv-tensor": 0.03}
fp8_recipe = pytest.mark.parametrize("recipe", recipes_with({"weights": E4M3_MATRIX}))
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory):
    root = tmp_path_factory.mktemp("trained")
    for recipe in RECIPES:
        compile_model(trained_model(), root / recipe, recipe=recipe)
    return {recipe: LoadedArtifact.open(root / recipe) for recipe in RECIPES}


@pytest.fixture(scope="module")
def material(artifacts):
    options = Options(distances=(128, 512), prompts=20, context=1024, tokens=8192, sequences=2)
    return make_material(artifacts["fp32"], options)


@fp8_recipe
def test_perplexity_is_close(artifacts, material, recipe):
    exact, ours = (
        measure_perplexity(
            artifacts[name].runner(max_tokens=material.longest), material.windows, "sparse"
        )
        for name in ("fp32", recipe)
    )
    assert ours.per_token != exact.per_token
    assert ours.per_token == pytest.approx(exact.per_token, rel=PERPLEXITY[recipe])


@fp8_recipe
def test_what_is_recalled_in_fp32_is_recalled(artifacts, material, recipe):
    exact, ours = (
        measure_recall(
            artifacts[name].runner(max_tokens=material.longest), material.recall, "sparse"
        )
        for name in ("fp32", recipe)
    )
    for row, reference in zip(ours, exact, strict=True):
        assert reference.accuracy >= 0.95
        assert row.accuracy >= reference.accuracy - 0.01


@fp8_recipe
def test_the_indexer_chooses_nearly_the_same_keys(artifacts, material, recipe):
    fp8 = artifacts[recipe]
    topk = fp8.spec.index_topk
    sequences = {n: s for n, s in material.around_topk.items() if n > topk}
    runner = fp8.runner(max_tokens=material.longest)
    rows = measure_overlap(runner, references(fp8), sequences, topk, "sparse")
    assert {row.length for row in rows} >= {256, 1024}
    means = [row.mean for row in rows]
    assert sum(means) / len(means) >= 0.98
    assert min(means) >= 0.96
    # what is exchanged lies at the cut: keys further below would be a wrong indexer
    assert max(row.deficit for row in rows) < 0.4
