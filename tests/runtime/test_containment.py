"""A request whose step fails by itself fails alone; the others get their exact tokens."""

import math

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from dsa_compile.runtime import Engine, EngineOptions, StepError
from tests.runtime.hash_runner import reference_tokens

from .async_runner import AsyncHashRunner
from .test_step_pipeline import FLATNESS, SIZE, VOCAB, EngineMachine, alone, greedy

REFUSED = "layer 2, region moe.long: dsa.experts failed: a planted fault"


class FaultyRunner(AsyncHashRunner):
    """An op refuses every step that computes a request in ``guilty`` beyond ``tokens`` tokens."""

    engine = None
    guilty: frozenset[str] = frozenset()
    tokens = 0

    def check(self, batch):
        super().check(batch)
        known = self.engine.scheduler.requests
        rows = {known[name].row for name in self.guilty if name in known}
        contexts = zip(batch.request_rows.tolist(), batch.context_lens.tolist(), strict=True)
        if any(row in rows and context > self.tokens for row, context in contexts):
            self.log.append(("refused", batch.num_requests))
            self.caches[:, batch.slot_mapping] = 0xBAD  # half of the step has run
            raise StepError(REFUSED)


def make_engine(overlap, **config):
    runner = FaultyRunner(400, SIZE, VOCAB)
    runner.engine = Engine(runner, EngineOptions(async_scheduling=overlap, **config))
    return runner.engine, runner


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("tokens", [0, 40, 52])
def test_one_of_thirty_two(overlap, deterministic, tokens):
    """In its prompt's first chunk, in a later one, after some generated tokens."""
    engine, runner = make_engine(overlap, max_num_batched_tokens=96, deterministic=deterministic)
    rng = np.random.default_rng(tokens)
    prompts = {f"r{n}": rng.integers(0, VOCAB, 3 + n).tolist() for n in range(32)}
    prompts["r11"] = rng.integers(0, VOCAB, 45).tolist()
    runner.guilty, runner.tokens = frozenset({"r11"}), tokens
    for name, prompt in prompts.items():
        engine.add_request(name, prompt, greedy(20))
    done = {}
    while engine.has_unfinished():
        done |= {out.request_id: out for out in engine.step() if out.finished}
        engine.scheduler.check()
    bad = done.pop("r11")
    assert (bad.finish_reason, bad.error) == ("error", f"request 'r11': {REFUSED}")
    assert len(bad.token_ids) == max(0, tokens - 45 + 1)
    assert bad.token_ids == reference_tokens(prompts["r11"], 20, VOCAB)[: len(bad.token_ids)]
    assert len(done) == 31
    for name, output in done.items():
        assert output.token_ids == reference_tokens(prompts[name], 20, VOCAB), name
    refused = [count for kind, count in runner.log if kind == "refused"]
    assert refused[-1] == 1
    assert len(refused) <= 2 + math.ceil(math.log2(32)) + 1
    assert engine.stats().op_failures == len(refused)
    assert engine.stats().owned_blocks == 0


def test_several_are_found_one_after_another():
    engine, runner = make_engine(True)
    runner.guilty, runner.tokens = frozenset({"r3", "r4", "r30"}), 10
    prompts = {f"r{n}": [n, n + 1, n + 2] for n in range(32)}
    for name, prompt in prompts.items():
        engine.add_request(name, prompt, greedy(20))
    done = {}
    while engine.has_unfinished():
        done |= {out.request_id: out for out in engine.step() if out.finished}
    for name, output in done.items():
        assert (output.finish_reason == "error") == (name in runner.guilty)
        want = reference_tokens(prompts[name], 20, VOCAB)
        assert output.token_ids == (want[:8] if name in runner.guilty else want)


def test_everybody_else_goes_on_while_the_guilty_is_looked_for():
    """Each level of halving gives its sound half a token, so nobody waits long."""
    engine, runner = make_engine(False)
    for n in range(32):
        engine.add_request(f"r{n}", [n] * 3, greedy(30))
    engine.step()
    runner.guilty = frozenset({"r0"})
    counts = dict.fromkeys((f"r{n}" for n in range(32)), 1)
    failed = False
    while not failed:
        for output in engine.step():
            counts[output.request_id] = len(output.token_ids)
            failed |= output.finish_reason == "error"
    assert max(counts.values()) - min(counts.values()) <= 1


class FaultMachine(EngineMachine):
    """As before, and now and then one of the requests makes its steps fail."""

    def make(self, *args, **config):
        runner = FaultyRunner(*args, SIZE, VOCAB, eos_token_ids=(7,))
        runner.engine = Engine(runner, EngineOptions(async_scheduling=True, **config))
        return runner.engine, runner

    @precondition(lambda self: self.asked)
    @rule(choice=st.integers(0, 50), tokens=st.integers(0, 30))
    def spoil(self, choice, tokens):
        names = sorted(self.asked)
        self.runner.guilty |= {names[choice % len(names)]}
        self.runner.tokens = tokens

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        self.finish()
        for name, (prompt, params) in self.asked.items():
            reason, tokens = self.finished[name]
            want = alone(prompt, params, FLATNESS)
            assert tokens == (want[: len(tokens)] if reason in ("abort", "error") else want)
            assert reason != "error" or name in self.runner.guilty, "an innocent was blamed"


TestFaults = FaultMachine.TestCase
TestFaults.settings = settings(
    max_examples=60,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
