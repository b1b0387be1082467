"""The measures on a model that has learned something, as only such a model can show them."""

from copy import copy
from dataclasses import replace

import pytest

from dsa_compile.errors import ArtifactError
from dsa_compile.ir.plan import MODEL
from dsa_compile.lowering.compile_model import compile_model
from dsa_compile.measure.eval.draft_chains import chains_of
from dsa_compile.measure.eval.hf import HfModel
from dsa_compile.measure.eval.hf_agreement import compare_logits, generate_greedily
from dsa_compile.measure.eval.loaded_artifact import LoadedArtifact
from dsa_compile.measure.eval.material import make_material
from dsa_compile.measure.eval.mtp_acceptance import measure_acceptance
from dsa_compile.measure.eval.options import Options
from dsa_compile.measure.eval.perplexity import measure_perplexity
from dsa_compile.measure.eval.recall_accuracy import measure_recall
from tests.trained import trained_model


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    out = tmp_path_factory.mktemp("trained") / "artifact"
    compile_model(trained_model(), out, weights="pack")
    return LoadedArtifact.open(out, trained_model())


@pytest.fixture(scope="module")
def material(trained):
    return make_material(trained, Options(distances=(256,), prompts=8, context=512, tokens=512))


@pytest.mark.slow
def test_recall_needs_the_right_keys(trained, material):
    accuracy = {}
    for selection in ("sparse", "random", "recent", "interleaved"):
        (row,) = measure_recall(trained.runner(selection), material.recall, selection)
        accuracy[selection] = row.accuracy
    assert accuracy.pop("sparse") >= 7 / 8
    assert max(accuracy.values()) <= 1 / 8


@pytest.mark.slow
def test_deeper_drafts_want_the_states_after_the_norm(trained, material):
    """The module was trained on normed states; accepted drafts tell, wrong states raise nothing."""

    right = chains_of(trained, 512)

    def raw(plan, start, tokens, given):
        values = right._run(plan, start, tokens, given)
        return values if plan == MODEL else values | {"normed": values["hidden"]}

    wrong = copy(right)
    wrong._run = raw
    assert right.carried == ("normed",)
    accepted = {}
    for name, drafts in (("right", right), ("wrong", wrong)):
        prompts = material.prompts(32, 256)
        rows = measure_acceptance(drafts, trained.runner(), [], prompts, 48, depth=4)
        accepted[name] = [row.accepted for row in rows]
    assert accepted["right"][0] == accepted["wrong"][0]  # the first draft is of the model's states
    assert sum(accepted["right"]) > 1.01 * sum(accepted["wrong"])
    assert accepted["right"][3] > accepted["wrong"][3]


def test_text_needs_the_right_keys(trained, material):
    perplexity = {
        selection: measure_perplexity(trained.runner(selection), material.windows, selection)
        for selection in ("sparse", "dense", "random", "interleaved")
    }
    own = perplexity["sparse"].per_token
    assert own < 30
    assert perplexity["dense"].per_token == pytest.approx(own, rel=0.01)
    assert perplexity["random"].per_token > 3 * own
    assert perplexity["interleaved"].per_token > 2 * own


def test_packed_it_is_still_the_reference_model(trained, material):
    hf = HfModel(trained.model_dir, trained.spec)
    runner = trained.runner()
    windows = [window.ids for window in material.windows]
    logits = compare_logits("hf", runner.logits(windows), hf.logits(windows))
    assert logits.max_abs < 1e-3  # logits reach 30
    prompts = material.prompts(8, 300)
    assert generate_greedily(runner, prompts, 16) == hf.generate(prompts, 16)


def test_a_packed_artifact_does_not_know_its_model(trained):
    with pytest.raises(ArtifactError, match="name the model with --model-dir"):
        _ = replace(trained, given_model_dir=None).model_dir
