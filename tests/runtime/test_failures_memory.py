"""Steps that find no memory: at the most the request to blame fails, nobody else notices."""

import math
import re

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import rule

from dsa_compile.runtime import Engine, EngineOptions
from tests.runtime.hash_runner import reference_tokens

from .async_runner import AsyncHashRunner
from .test_step_pipeline import FLATNESS, SIZE, VOCAB, EngineMachine, alone, greedy, run


def engine_with(memory, overlap, **config):
    runner = AsyncHashRunner(200, SIZE, VOCAB)
    runner.memory = memory
    return Engine(runner, EngineOptions(async_scheduling=overlap, **config)), runner


def attempts(runner):
    """Tokens of the steps that found no memory."""
    return [count for kind, count in runner.log if kind == "no memory"]


@pytest.mark.parametrize("overlap", [True, False])
def test_a_prompt_whose_chunk_does_not_fit_is_computed_in_smaller_ones(overlap):
    prompt = list(range(40))
    engine, runner = engine_with(memory=500, overlap=overlap, max_num_batched_tokens=64)
    output = engine.generate([prompt], greedy(6))[0]
    assert output.token_ids == reference_tokens(prompt, 6, VOCAB)
    assert attempts(runner) == [40, 20]
    assert [b.num_tokens for b in runner.steps if b.num_tokens > 1] == [20, 10, 10]
    assert engine.stats().memory_failures == len(attempts(runner))


@pytest.mark.parametrize("overlap", [True, False])
def test_a_request_that_does_not_fit_fails_alone(overlap):
    engine, runner = engine_with(10**9, overlap, max_num_batched_tokens=128)
    prompts = {f"r{n}": [n] * 3 for n in range(7)} | {"long": list(range(48)) * 2}
    for name, prompt in prompts.items():
        engine.add_request(name, prompt, greedy(12))
    engine.step()
    engine.drain()
    runner.memory = 80
    outputs = []
    while not any(output.finished for output in outputs):
        outputs = engine.step()
    [bad] = outputs
    known = len(bad.token_ids)
    assert (bad.request_id, bad.finish_reason) == ("long", "error"), "while the others run"
    assert bad.token_ids == reference_tokens(prompts["long"], known, VOCAB)
    assert re.fullmatch(
        "request 'long': out of memory even when computed alone, 1 token at position "
        f"{96 + known - 1}: wanted 2.00 GiB with 412.00 MiB free; load with a lower "
        "gpu_memory_utilization or num_gpu_blocks_override, which leaves more to steps",
        bad.error,
    )
    done = run(engine)
    assert done.keys() == prompts.keys() - {"long"}
    for name, output in done.items():
        assert output.token_ids == reference_tokens(prompts[name], 12, VOCAB)
    engine.scheduler.check()


def test_decoding_goes_on_while_a_prompt_is_cut_ever_smaller():
    """Every step that runs has a token for each of them."""
    engine, runner = engine_with(10**9, overlap=False, max_num_batched_tokens=64)
    for n in range(4):
        engine.add_request(f"r{n}", [n] * 2, greedy(30))
    engine.step()
    runner.memory = 250
    engine.add_request("long", list(range(48)) * 2, greedy(1))
    counts = dict.fromkeys((f"r{n}" for n in range(4)), 1)
    for rounds in range(2, 12):
        before = engine.stats().memory_failures
        while min(counts.values()) < rounds:
            for output in engine.step():
                counts[output.request_id] = len(output.token_ids)
        assert max(counts.values()) - min(counts.values()) <= 1
        assert engine.stats().memory_failures - before <= 7, "halvings of 60 tokens"


def test_who_was_to_blame_leaves_no_limit_behind():
    engine, runner = engine_with(memory=60, overlap=False)
    engine.add_request("long", list(range(48)) * 2, greedy(1))
    while engine.has_unfinished():
        engine.step()
    runner.memory = 10**9
    engine.generate([[9] * 60], greedy(1))
    assert runner.steps[-1].num_tokens == 60


def test_a_growing_context_fails_where_it_no_longer_fits_and_keeps_its_tokens():
    """The step before it is in flight, and its token is given first."""
    engine, runner = engine_with(memory=30, overlap=True)
    engine.add_request("long", [1] * 4, greedy(60))
    engine.add_request("short", [2, 3], greedy(20))
    runner.memory = 45
    done = run(engine)
    assert done["long"].finish_reason == "error"
    tokens = done["long"].token_ids
    assert tokens == reference_tokens([1] * 4, 60, VOCAB)[: len(tokens)]
    assert len(tokens) == 45 - 4 + 1, "the token at context 45 was the last that fitted"
    assert done["short"].token_ids == reference_tokens([2, 3], 20, VOCAB)


def test_every_request_of_a_step_that_is_halved_makes_progress():
    """Nobody starves behind those before them."""
    engine, runner = engine_with(memory=10**9, overlap=False)
    for n in range(16):
        engine.add_request(f"r{n}", [n] * 4, greedy(12))
    engine.step()
    runner.memory = 4 * 5  # rows of one step
    progress = dict.fromkeys((f"r{n}" for n in range(16)), 1)
    for _ in range(4):
        for output in engine.step():
            progress[output.request_id] = len(output.token_ids)
    assert attempts(runner) == [16, 8, 8]
    assert set(progress.values()) == {2}
    runner.memory = 10**9
    assert run(engine).keys() == progress.keys()


def test_steps_grow_again_once_memory_is_back():
    engine, runner = engine_with(memory=300, overlap=True, max_num_batched_tokens=32)
    engine.add_request("a", list(range(40)), greedy(1))
    run(engine)
    assert attempts(runner)
    runner.memory = 10**9
    runner.log.clear()
    seen = set()
    for n in range(200):
        engine.add_request(f"b{n}", [n % VOCAB] * 64, greedy(1))
        before = len(runner.steps)
        run(engine)
        seen |= {batch.num_tokens for batch in runner.steps[before:]}
        if 32 in seen:
            break
    assert 32 in seen, "steps of the full size again"
    assert not attempts(runner)


def test_few_steps_fail_where_memory_stays_short():
    """A step's size is remembered: not every step fails before it succeeds."""
    engine, runner = engine_with(memory=2000, overlap=True, max_num_batched_tokens=64)
    prompts = [[n] * 60 for n in range(40)]
    outputs = engine.generate(prompts, greedy(2))
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.token_ids == reference_tokens(prompt, 2, VOCAB)
    assert len(attempts(runner)) < len(runner.steps) / 10


def test_deterministic_prompts_are_not_cut_otherwise():
    """Chunks make deterministic prompts repeatable: the prompt whose chunk does not fit fails."""
    engine, runner = engine_with(200, True, max_num_batched_tokens=16, deterministic=True)
    prompts = [[1] * 6, [2] * 40, [3] * 5]
    good, bad, other = engine.generate(prompts, greedy(5))
    assert bad.finish_reason == "error"
    assert "16 tokens at position 0" in bad.error
    assert "or max_num_batched_tokens" in bad.error
    assert good.token_ids == reference_tokens(prompts[0], 5, VOCAB)
    assert other.token_ids == reference_tokens(prompts[2], 5, VOCAB)
    sizes = {batch.num_tokens for batch in runner.steps if batch.num_tokens > batch.num_requests}
    assert sizes == {6, 5}


def test_a_request_aborted_while_it_waits_for_its_part():
    engine, runner = engine_with(10**9, True, max_num_batched_tokens=64)
    for n in range(4):
        engine.add_request(f"r{n}", [n] * 4, greedy(9))
    engine.step()
    runner.memory = 20
    engine.step()
    assert engine._pipeline.smaller.pending
    assert engine.abort("r2").finish_reason == "abort"
    assert engine.abort("r0").finish_reason == "abort"
    runner.memory = 10**9
    done = run(engine)
    assert done.keys() == {"r1", "r3"}
    for name, output in done.items():
        assert output.token_ids == reference_tokens([int(name[1])] * 4, 9, VOCAB)


class MemoryMachine(EngineMachine):
    """As before, and memory comes and goes: only what cannot fit fails."""

    least = math.inf

    @rule(memory=st.sampled_from([16, 40, 100, 400, 10**6]))
    def change(self, memory):
        self.runner.memory = memory
        self.least = min(self.least, memory)

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        self.finish()
        for name, (prompt, params) in self.asked.items():
            reason, tokens = self.finished[name]
            want = alone(prompt, params, FLATNESS)
            assert tokens == (want[: len(tokens)] if reason in ("abort", "error") else want)
            if reason == "error":
                keys = len(prompt) + len(tokens)
                if self.engine.scheduler.config.deterministic:
                    keys *= min(len(prompt), self.engine.scheduler.config.chunk)
                assert keys > self.least, "it would have fitted, a token at a time"


TestMemory = MemoryMachine.TestCase
TestMemory.settings = settings(
    max_examples=80,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
