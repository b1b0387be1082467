"""Drafts of engines as they are loaded: the stage of a device, as far as a CPU runs it."""

import weakref
from itertools import pairwise
from typing import Any

import pytest
import torch

from dsa_compile.lowering.compile_model import compile_model
from dsa_compile.runtime.execution import draft_rows
from dsa_compile.runtime.execution.graph_plan import GraphPlan
from dsa_compile.runtime.requests.sampling_params import SamplingParams
from dsa_compile.testing.models import save_hub, tiny_config, tiny_model
from dsa_compile.verify.bisect.device_answers import DeviceAnswers, likely_drafts
from dsa_compile.verify.bisect.runtime_check import wrong_option_on_device
from dsa_compile.verify.bisect.runtime_scenes import Scene, drafted_scenes
from dsa_compile.verify.execution.recorded_drafts import RecordedDrafts
from dsa_compile.verify.recompiled_artifact import RecompiledArtifact

Patch = pytest.MonkeyPatch
BLOCK = 16


@pytest.fixture(scope="module")
def drafting(tmp_path_factory: pytest.TempPathFactory) -> RecompiledArtifact:
    """A dense layer, an MoE layer and one that drafts."""
    model, path = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("out") / "mtp"
    save_hub(tiny_model(tiny_config(2, first_k_dense_replace=1)), model, fp8=False)
    compile_model(model, path, draft="mtp", block_size=BLOCK, records=False)
    return RecompiledArtifact.open(path)


def scenes_of(recompiled: RecompiledArtifact) -> list[Scene]:
    spec = recompiled.exported.spec
    return list(drafted_scenes(BLOCK, spec.index_topk, spec.vocab_size, gpu=True))


def deeper_one_too_far(patch: Patch) -> None:
    """A deeper draft's row is one position too far."""
    right = draft_rows.deeper_rows
    patch.setattr(
        draft_rows, "deeper_rows", lambda rows, depth, block: right(rows, depth + 1, block)
    )


def test_a_device_has_the_scenes_of_the_cpu_and_graphs() -> None:
    alone, graphs, cut = drafted_scenes(BLOCK, 8, 512, gpu=True)
    on_cpu = list(drafted_scenes(BLOCK, 8, 512))
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
def test_a_fault_of_drafts_is_named(drafting: RecompiledArtifact, monkeypatch: Patch) -> None:
    deeper_one_too_far(monkeypatch)
    found = wrong_option_on_device(drafting)
    assert found is not None
    assert found[0] == "drafting"
    assert "draft 2 behind token 1 is " in found[1]


@pytest.mark.slow
@pytest.mark.parametrize("padded", [False, True])
def test_every_checked_draft_is_recorded(drafting: RecompiledArtifact, padded: bool) -> None:
    """Steps of a padded size write what those of their own size write."""
    answers = DeviceAnswers(drafting)
    scene = scenes_of(drafting)[1]
    (turn,) = scene.rounds
    engine = answers.load(scene.options, 128)
    runner: Any = engine._runner
    if padded:
        runner.pad_to(
            GraphPlan.of(
                max_running=4, max_model_len=128, block_size=BLOCK, topk=None, num_drafts=3
            )
        )
    record = RecordedDrafts(runner)  # within the one that load made
    params = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True)
    engine.generate([list(prompt) for prompt in turn.prompts], params)
    for length in map(len, turn.prompts):  # the position of a last token tells requests apart
        mine = {one.end: one.tokens for one in record.checked if length <= one.end < length + 8}
        assert mine[length], record.checked
        assert all(len(tokens) <= 3 for tokens in mine.values())
        steps = sorted(mine)
        assert all(0 < there - here <= 4 for here, there in pairwise(steps))
    assert record.checked == answers._recorded.checked  # type: ignore[union-attr]
    engine.close()


def test_a_draft_may_be_any_that_rounding_explains() -> None:
    exact = {7: torch.tensor([[0.0, 5.0, 4.9, 1.0], [9.0, 0.0, 0.0, 0.0]]).double()}
    rounded = {7: exact[7] + torch.tensor([0.0, 0.05, 0.0, 0.0])}
    assert likely_drafts(exact, rounded, {7: (2, 0)}) == {7: (2, 0)}
    assert likely_drafts(exact, rounded, {7: (3, 0)}) == {7: (1, 0)}
    assert likely_drafts(exact, exact, {7: (2, 1)}) == {7: (1, 0)}


def test_what_follows_a_near_tie_is_no_measure_of_rounding() -> None:
    """Both sides go on with tokens of their own where nothing was drafted, and behind drafts."""
    first = torch.tensor([0.0, 5.0, 4.9, 1.0]).double()
    ours, theirs = torch.tensor([[9.0, 0.0, 0.0, 0.0], [0.0, 9.0, 0.0, 0.0]]).double()
    exact = {7: torch.stack([first, ours]), 8: torch.stack([ours, ours])}
    rounded = {7: torch.stack([first, theirs]), 8: torch.stack([ours, theirs])}
    assert likely_drafts(exact, rounded, {7: (3,)}) == {7: (1,)}
    assert likely_drafts(exact, rounded, {7: (1,)}) == {7: (1,)}
    assert likely_drafts(exact, rounded, {7: ()}) == {7: ()}


@pytest.mark.slow
def test_engines_of_scenes_are_freed(drafting: RecompiledArtifact, monkeypatch: Patch) -> None:
    runners: list[weakref.ref[Any]] = []
    right = DeviceAnswers.load

    def load(self: DeviceAnswers, *args: Any) -> Any:
        engine = right(self, *args)
        runners.append(weakref.ref(engine._runner))
        return engine

    monkeypatch.setattr(DeviceAnswers, "load", load)
    answers = DeviceAnswers(drafting)
    answers.limit = 1e9
    for scene in scenes_of(drafting)[:2]:
        assert answers.problem(scene.but(enforce_eager=True)) == ""
    alive = [runner for runner in runners if runner() is not None]
    assert len(alive) == 1, "that of plain answers alone"
    answers.close()
