"""Statistics of an engine's steps, and when a request was first scheduled."""

import time

from dsa_compile.runtime import Engine, EngineOptions, SamplingParams
from dsa_compile.runtime.scheduling.stats import EAGER, StepKind
from tests.runtime.hash_runner import HashRunner

from .async_runner import AsyncHashRunner

GREEDY = SamplingParams(max_tokens=6, temperature=0.0)


def test_steps_are_counted_by_how_they_ran() -> None:
    """Steps of loading are left out."""
    runner = HashRunner(50, 4)
    Engine(runner).generate([[1, 2, 3]], GREEDY)
    before = len(runner.steps)
    assert before == 6
    engine = Engine(runner)
    assert engine.stats().step_counts == {}
    engine.generate([[1, 2, 3], [4]], GREEDY)
    assert engine.stats().step_counts == {StepKind(EAGER, "long"): len(runner.steps) - before}


def test_the_wait_for_tokens_is_measured() -> None:
    class Slow(AsyncHashRunner):
        def launch(self, inputs):
            launched = super().launch(inputs)

            class Waited:
                def wait(self):
                    time.sleep(0.01)
                    return launched.wait()

            return Waited()

    engine = Engine(Slow(50, 4, 64), EngineOptions(async_scheduling=False))
    assert engine.stats().wait_seconds == 0
    began = time.perf_counter()
    engine.generate([[1, 2, 3]], GREEDY)
    assert 0.06 <= engine.stats().wait_seconds <= time.perf_counter() - began


def test_when_a_request_was_first_scheduled() -> None:
    """A preempted request keeps it."""
    engine = Engine(HashRunner(12, 4), EngineOptions(enable_prefix_caching=False))
    params = SamplingParams(max_tokens=20, temperature=0.0)
    began = time.perf_counter()
    for name in "ab":
        engine.add_request(name, [1] * 12, params)
    seen: dict[str, set[float | None]] = {"a": set(), "b": set()}
    while engine.has_unfinished():
        for output in engine.step():
            seen[output.request_id].add(output.scheduled_at)
    assert engine.stats().preemptions > 0
    for times in seen.values():
        (at,) = times
        assert at is not None
        assert began <= at <= time.perf_counter()


def test_a_request_that_never_ran() -> None:
    engine = Engine(HashRunner(12, 4))
    engine.add_request("a", [1, 2], GREEDY)
    output = engine.abort("a")
    assert output is not None
    assert output.scheduled_at is None
