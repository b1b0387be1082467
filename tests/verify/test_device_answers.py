"""Requests of a device: engines as they are loaded, as far as a CPU runs them."""

import pytest

from dsa_compile.runtime.execution import draft_rows
from dsa_compile.verify.bisect.runtime_answers import Answers
from dsa_compile.verify.bisect.runtime_check import wrong_option_on_device
from dsa_compile.verify.bisect.runtime_scenes import drafted_scenes
from dsa_compile.verify.recompiled_artifact import RecompiledArtifact

Patch = pytest.MonkeyPatch


def test_a_device_has_the_scenes_of_the_cpu_and_graphs() -> None:
    alone, graphs, cut = drafted_scenes(16, 8, 512, gpu=True)
    on_cpu = list(drafted_scenes(16, 8, 512))
    assert alone == on_cpu[0]
    assert "CUDA graphs" in graphs.without
    assert [scene.options["enforce_eager"] for scene in (graphs, cut)] == [False, False]
    assert graphs.ahead, "the host chooses tokens that are described, and no graph runs"
    assert cut.but(enforce_eager=True).options == on_cpu[1].options
    for scene in (alone, graphs, cut):
        rows = scene.options["max_num_seqs"] * (1 + scene.options["num_speculative_tokens"])
        assert scene.options.get("max_num_batched_tokens", rows) >= rows


@pytest.mark.slow
def test_nothing_is_wrong_with_a_healthy_engine(drafting: RecompiledArtifact) -> None:
    assert wrong_option_on_device(drafting) is None


@pytest.mark.slow
def test_tokens_that_drafting_changes_are_named(
    drafting: RecompiledArtifact, monkeypatch: Patch
) -> None:
    """On a device tokens are compared, and not drafts."""
    answers, spec = Answers(drafting, exact=False), drafting.exported.spec
    *_, ahead = drafted_scenes(16, spec.index_topk, spec.vocab_size, gpu=True)
    monkeypatch.setattr(draft_rows, "count_right", lambda sampled, drafts, max_new: max_new)
    found = answers.problem(ahead)
    answers.close()
    assert "token" in found
