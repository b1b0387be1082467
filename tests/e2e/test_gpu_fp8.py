"""Trained models in every recipe on a Hopper GPU, measured as ``dsa-eval`` measures it.

The yardstick of each figure is the same recipe's on the CPU, whose kernels are the ops' references.
"""

from functools import cache
from pathlib import Path

import pytest
import torch

from dsa_compile.facts.formats import E4M3_MATRIX, recipes_with
from dsa_compile.lowering.compile_model import compile_model
from dsa_compile.measure.eval.indexer_overlap import measure_overlap, references
from dsa_compile.measure.eval.loaded_artifact import LoadedArtifact
from dsa_compile.measure.eval.material import make_material
from dsa_compile.measure.eval.options import Options
from dsa_compile.measure.eval.perplexity import measure_perplexity
from dsa_compile.measure.eval.recall_accuracy import measure_recall
from dsa_compile.runtime import Engine, SamplingParams
from tests.trained import trained_model

pytestmark = pytest.mark.gpu(capability=(9, 0))
EXAMPLES = Path(__file__).parents[2] / "examples"
RECIPES = ("fp32", "bf16", *recipes_with({"weights": E4M3_MATRIX}))
# Of the perplexity on the CPU. A key exchanged at the cut of the top-k moves single tokens.
PERPLEXITY = {"fp32": 1e-3, "bf16": 0.01, "fp8": 0.01, "fp8-kv-tensor": 0.01}
OPTIONS = Options(distances=(200,), prompts=8, context=512, tokens=2048, sequences=1)
each_recipe = pytest.mark.parametrize("recipe", RECIPES)


@pytest.fixture(scope="module", params=["tiny_v32_fp8", "tiny_glm"])
def path_of(request, tmp_path_factory):
    root = tmp_path_factory.mktemp("artifacts")

    @cache
    def get(target, recipe):
        path = root / f"{target}-{recipe}"
        compile_model(trained_model(request.param), path, target=target, recipe=recipe)
        return path

    return get


@pytest.fixture(scope="module")
def opened(path_of):
    return cache(lambda target, recipe: LoadedArtifact.open(path_of(target, recipe)))


@pytest.fixture(scope="module")
def material(opened):
    return make_material(opened("cpu", "fp32"), OPTIONS)


@pytest.fixture(scope="module")
def logits(opened, material):
    """Logits [tokens, V] of the windows of text."""

    @cache
    def get(target, recipe):
        runner = opened(target, recipe).runner(max_tokens=material.longest)
        windows = [window.ids for window in material.windows[:4]]
        return torch.cat([found.cpu() for found in runner.logits(windows)])

    return get


@each_recipe
def test_perplexity(opened, material, recipe):
    on_cpu, on_gpu = (
        measure_perplexity(
            opened(target, recipe).runner(max_tokens=material.longest), material.windows, "sparse"
        ).per_token
        for target in ("cpu", "sm_90a")
    )
    print(f"perplexity {on_gpu:.4f}, on the CPU {on_cpu:.4f}")
    assert on_gpu == pytest.approx(on_cpu, rel=PERPLEXITY[recipe])


@each_recipe
def test_recall(opened, material, recipe):
    on_cpu, on_gpu = (
        measure_recall(
            opened(target, recipe).runner(max_tokens=material.longest), material.recall, "sparse"
        )
        for target in ("cpu", "sm_90a")
    )
    for reference, row in zip(on_cpu, on_gpu, strict=True):
        print(f"recall {row.accuracy:.3f}, on the CPU {reference.accuracy:.3f}")
        assert reference.accuracy >= 0.8
        assert row.accuracy >= reference.accuracy - 1 / OPTIONS.prompts


@each_recipe
def test_the_keys_chosen_are_those_of_an_fp64_indexer(opened, material, recipe):
    """As many of them as on the CPU, up to 1 %."""
    overlap = {}
    for target in ("cpu", "sm_90a"):
        loaded = opened(target, recipe)
        topk = loaded.spec.index_topk
        sequences = {n: some for n, some in material.around_topk.items() if n > topk}
        runner = loaded.runner(max_tokens=material.longest)
        rows = measure_overlap(runner, references(loaded), sequences, topk, "sparse")
        overlap[target] = sum(row.mean for row in rows) / len(rows)
    print(f"overlap {overlap['sm_90a']:.4f}, on the CPU {overlap['cpu']:.4f}")
    assert overlap["sm_90a"] >= overlap["cpu"] - 0.01


@each_recipe
def test_logits_are_as_near_to_fp32_as_on_the_cpu(logits, recipe):
    """Error of a recipe's kernels may be that of its reference, and a tenth more.

    Two independent roundings are sqrt(2) times as far apart as one of them is from fp32, and as
    many more of the likeliest tokens differ.
    """
    exact, reference, found = (
        logits(target, of) for target, of in (("cpu", "fp32"), ("cpu", recipe), ("sm_90a", recipe))
    )
    assert found.isfinite().all()
    distance = float((found - exact).norm() / exact.norm())
    allowed = float((reference - exact).norm() / exact.norm())
    moved, rounded = (
        float((side.argmax(1) != reference.argmax(1)).float().mean()) for side in (found, exact)
    )
    print(f"distance {distance:.5f}, on the CPU {allowed:.5f}")
    print(f"other likeliest tokens: {moved:.4f}, between the CPU's and fp32's {rounded:.4f}")
    assert distance <= 1.1 * allowed + 1e-3
    assert moved <= (1.5 * rounded + 0.005 if rounded else 0.001)


@each_recipe
def test_an_engine_with_graphs_gives_the_tokens_of_one_without(path_of, material, recipe):
    """Around the top-k, prompts in chunks; in FP8 a near-tie may fall otherwise in other shapes."""
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    ids = [token for window in material.windows for token in window.ids]
    prompts = [ids[100 * n : 100 * n + length] for n, length in enumerate((5, 63, 64, 65, 300))]
    tokens = []
    for graphs in (True, False):
        engine = Engine.load(
            path_of("sm_90a", recipe),
            num_gpu_blocks_override=200,
            max_num_seqs=8,
            max_num_batched_tokens=128,
            enforce_eager=not graphs,
        )
        tokens.append([out.token_ids for out in engine.generate(prompts, params)])
    same = [a == b for with_, without in zip(*tokens, strict=True)
            for a, b in zip(with_, without, strict=True)]  # fmt: skip
    print(f"agreement {sum(same) / len(same):.3f}")
    if recipe == "fp32":
        assert all(same)
    assert sum(same) / len(same) >= 0.8
