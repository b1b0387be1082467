"""Steps that yield several tokens a request give the tokens of steps that yield one."""

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

from dsa_compile.runtime import Engine, EngineOptions, SamplingParams
from tests.runtime.hash_runner import reference_tokens

from .drafting_runner import DraftingRunner
from .test_step_pipeline import EOS, FLATNESS, SIZE, VOCAB, EngineMachine, alone, greedy
from .test_step_pipeline import run as finish


def make_engine(overlap, num_blocks=300, num_drafts=4, right=0.6, **config):
    runner = DraftingRunner(num_blocks, SIZE, VOCAB, num_drafts, right, eos_token_ids=(EOS,))
    return Engine(runner, EngineOptions(async_scheduling=overlap, **config)), runner


def prompts(count, longest=30):
    rng = np.random.default_rng(count)
    return [rng.integers(0, VOCAB, n).tolist() for n in rng.integers(1, longest, count)]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("right", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("deterministic", [True, False])
def test_tokens_are_those_without_drafts(overlap, right, deterministic):
    engine, runner = make_engine(overlap, right=right, deterministic=deterministic)
    asked = prompts(12)
    outputs = engine.generate(asked, greedy(25, ignore_eos=True))
    for prompt, output in zip(asked, outputs, strict=True):
        assert output.token_ids == reference_tokens(prompt, 25, VOCAB)
    assert engine.stats().owned_blocks == 0
    if right == 0.6:
        assert set(runner.yields) == {1, 2, 3, 4, 5}
    steps = sum(runner.yields.values()) / len(asked)
    assert right < 1 or steps <= 25 / 4, "right drafts save steps"


@pytest.mark.parametrize("overlap", [True, False])
def test_sampled_tokens_and_ends_are_those_without_drafts(overlap):
    """Draws are by count, so a draft that was right does not shift them; an end token may come in
    the middle of what a step yields."""
    engine, runner = make_engine(overlap)
    runner.flatness = FLATNESS
    asked = prompts(16)
    params = [SamplingParams(max_tokens=20, seed=n, temperature=0.3) for n in range(16)]
    outputs = engine.generate(asked, params)
    for prompt, chosen, output in zip(asked, params, outputs, strict=True):
        assert output.token_ids == alone(prompt, chosen, FLATNESS)
    assert {output.finish_reason for output in outputs} == {"stop", "length"}
    assert max(runner.yields) > 1


@pytest.mark.parametrize("overlap", [True, False])
def test_requests_for_the_host_get_one_token_a_step(overlap):
    engine, _ = make_engine(overlap)
    engine.add_request("a", [1, 2, 3], greedy(12, ignore_eos=True))
    engine.step()
    engine.add_request("b", [4, 5], greedy(6, logprobs=2, ignore_eos=True))
    done = finish(engine)
    assert done["a"].token_ids == reference_tokens([1, 2, 3], 12, VOCAB)
    assert done["b"].token_ids == reference_tokens([4, 5], 6, VOCAB)
    assert [entry.token_id for entry in done["b"].logprobs] == done["b"].token_ids


@pytest.mark.parametrize("overlap", [True, False])
def test_only_rows_of_accepted_tokens_are_reused(overlap):
    """Drafts that were wrong have left rows in the blocks; a longer prompt finds none of them."""
    engine, _ = make_engine(overlap, right=0.5)
    prompt = prompts(1)[0]
    for _ in range(6):
        output = engine.generate([prompt], greedy(14, ignore_eos=True))[0]
        assert output.token_ids == reference_tokens(prompt, 14, VOCAB)
        # the last token was not computed
        known = len(prompt) - 1
        assert output.cached_tokens <= known // SIZE * SIZE
        prompt = prompt + output.token_ids


def test_a_pool_without_room_for_drafts_computes_fewer():
    """Drafts are not worth another request's blocks."""
    asked = [[n] * 4 for n in range(6)]
    engine, _ = make_engine(True, num_blocks=6 * 4 + 1)
    outputs = engine.generate(asked, greedy(12, ignore_eos=True))
    for prompt, output in zip(asked, outputs, strict=True):
        assert output.token_ids == reference_tokens(prompt, 12, VOCAB)
    assert engine.stats().preemptions == 0


def test_a_crowded_engine_checks_no_drafts():
    """Up to ``draft_max_rows`` requests get drafts; when others have ended, so do the rest."""
    engine, runner = make_engine(False, draft_max_rows=2)
    asked = prompts(3, longest=5)
    limits = (8, 8, 40)
    for name, (prompt, most) in enumerate(zip(asked, limits, strict=True)):
        engine.add_request(str(name), prompt, greedy(most, ignore_eos=True))
    crowded = 0
    while engine.has_unfinished():
        before = dict(runner.yields)
        running = engine.stats().running
        engine.step()
        if running == 3:
            crowded += 1
            assert {n for n, count in runner.yields.items() if count > before.get(n, 0)} == {1}
    assert crowded > 4
    assert max(runner.yields) > 1
    assert engine.stats().drafted


class DraftingMachine(EngineMachine):
    """As without drafts: whatever a caller does and whatever fails."""

    def make(self, num_blocks, **config):
        return make_engine(True, num_blocks, **config)


TestDrafting = DraftingMachine.TestCase
TestDrafting.settings = settings(
    max_examples=60,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
