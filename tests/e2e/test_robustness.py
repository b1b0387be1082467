"""Small caches, shared prefixes, lost pages, aborts, NaN: never another token."""

import random
from typing import Any

import pytest
import torch

from dsa_compile.runtime import Engine, SamplingParams
from dsa_compile.runtime.engine_options import EngineOptions
from dsa_compile.runtime.execution.model_runner import ModelRunner
from dsa_compile.runtime.loading import weight_loading
from dsa_compile.runtime.loading.load_runner import load_runner
from tests.quick_cases import quick_first

from .conftest import CASES

NAME = "grouped-4-layers"


def greedy(count: int) -> SamplingParams:
    return SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)


class Recorder:
    """A runner that keeps the logits of the steps whose tokens were chosen on the host."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.logits: list[torch.Tensor] = []
        self._forward = runner.forward
        runner.forward = self.forward  # type: ignore[method-assign]

    def __getattr__(self, name: str):
        return getattr(self._runner, name)

    def forward(self, batch):
        logits = self._forward(batch)
        self.logits.append(logits.float().cpu())
        return logits


def run(engine: Engine, prompts: list[list[int]], params: SamplingParams) -> list[list[int]]:
    return [out.token_ids for out in engine.generate(prompts, params)]


@pytest.fixture(scope="module")
def load(case):
    """One request at a time in a roomy cache: prompts and their tokens."""
    c = case(NAME)
    generator = random.Random(3)
    prompts = c.prompts([generator.randint(1, 6 * c.topk) for _ in range(32)], seed=3)
    engine = Engine.load(c.artifact, num_gpu_blocks_override=64, enable_prefix_caching=False)
    params = greedy(14)
    return prompts, params, [run(engine, [prompt], params)[0] for prompt in prompts]


@pytest.mark.parametrize("budget", [19, 2048])
@pytest.mark.parametrize("reuse", [True, False])
def test_thirty_two_requests_at_once(case, load, budget, reuse):
    prompts, params, want = load
    engine = Engine.load(
        case(NAME).artifact,
        max_num_batched_tokens=budget,
        enable_prefix_caching=reuse,
        num_gpu_blocks_override=256,
    )
    assert run(engine, prompts, params) == want
    assert engine.stats().preemptions == 0


@pytest.mark.parametrize("budget", [33, 2048])
def test_a_pool_four_times_too_small(case, load, budget):
    prompts, params, want = load
    size = 16
    needed = sum(-(-(len(prompt) + params.max_tokens) // size) for prompt in prompts)
    engine = Engine.load(
        case(NAME).artifact,
        num_gpu_blocks_override=needed // 4,
        max_num_batched_tokens=budget,
        verify="header",
    )
    assert run(engine, prompts, params) == want
    assert engine.stats().preemptions > 0


def test_requests_aborted_on_the_way(case, load):
    """At any step, waiting, in a prefill or decoding: the others do not notice."""
    prompts, params, want = load
    engine = Engine.load(case(NAME).artifact, num_gpu_blocks_override=40, max_num_batched_tokens=41)
    chance = random.Random(4)
    doomed = set(chance.sample(range(len(prompts)), 12))
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, params)
    finished, left = {}, sorted(doomed)
    while engine.has_unfinished():
        if left and chance.random() < 0.5:
            out = engine.abort(str(left.pop(0)))
            if out is not None:
                assert out.finish_reason == "abort"
                assert out.token_ids == want[int(out.request_id)][: len(out.token_ids)]
        for out in engine.step():
            if out.finished:
                finished[int(out.request_id)] = out.token_ids
        engine.scheduler.check()
    assert set(finished) >= set(range(len(prompts))) - doomed
    assert len(finished) < len(prompts), "nothing was aborted in time"
    assert all(tokens == want[i] for i, tokens in finished.items())
    stats = engine.stats()
    assert (stats.owned_blocks, stats.running, stats.waiting) == (0, 0, 0)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_shared_prefix_warm_and_cold(case, name):
    """Below and above index_topk, and where the requests part inside a block."""
    c = case(name)
    shared, *tails = c.prompts([5 * c.topk + 3, 1, 9, 40], seed=6)
    params = greedy(8)
    for prefix in (shared, shared[: c.topk - 2]):
        for tail in tails:
            recorder = Recorder(load_runner(c.artifact, EngineOptions(num_gpu_blocks_override=64)))
            engine = Engine(recorder, EngineOptions())
            [cold] = engine.generate([prefix + tail], params)
            cold_logits, recorder.logits = torch.cat(recorder.logits), []
            [warm] = engine.generate([prefix + tail], params)
            blocks = (len(prefix + tail) - 1) // 16
            assert (cold.cached_tokens, warm.cached_tokens) == (0, 16 * blocks)
            assert warm.token_ids == cold.token_ids
            torch.testing.assert_close(torch.cat(recorder.logits), cold_logits, rtol=0, atol=1e-5)
            # another request with the same beginning takes those pages and leaves them be
            [other] = engine.generate([prefix + tails[-1][::-1]], params)
            assert other.cached_tokens >= 16 * (len(prefix) // 16)
            assert other.token_ids == run(Engine(recorder), [prefix + tails[-1][::-1]], params)[0]


def test_index_pages_lost_at_random(case, load):
    """A prefix is found up to the lost page and no further, and no token changes."""
    prompts, params, want = load
    c = case(NAME)
    runner = load_runner(c.artifact, EngineOptions(num_gpu_blocks_override=48))
    engine = Engine(runner, EngineOptions(max_num_batched_tokens=37))
    chance = random.Random(8)
    caches = index_caches(runner)
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, params)
    finished = {}
    while engine.has_unfinished():
        if chance.random() < 0.3:
            lose_page(engine, caches, chance.randrange(runner.num_blocks))
        for out in engine.step():
            if out.finished:
                finished[int(out.request_id)] = out.token_ids
        engine.scheduler.check()
    assert [finished[i] for i in range(len(prompts))] == want

    longest = max(range(len(prompts)), key=lambda i: len(prompts[i]))
    [whole] = engine.generate([prompts[longest]], params)
    [again] = engine.generate([prompts[longest]], params)
    assert again.cached_tokens == 16 * ((len(prompts[longest]) - 1) // 16)
    for block in range(runner.num_blocks):
        lose_page(engine, caches, block)
    [after] = engine.generate([prompts[longest]], params)
    assert after.cached_tokens == 0
    assert whole.token_ids == again.token_ids == after.token_ids == want[longest]


def index_caches(runner: ModelRunner) -> list[torch.Tensor]:
    return [layer["index_cache"] for layer in runner.caches.values()]


def lose_page(engine: Engine, caches: list[torch.Tensor], block: int) -> None:
    """Forget an index page, and make sure that whoever reads it still is found out."""
    engine.scheduler.lose_page(block)
    for cache in caches:
        cache[block] = torch.nan


# NaN.


@pytest.mark.parametrize("name", quick_first(CASES))
def test_what_pages_held_before_is_never_read(case, name):
    """Every page full of NaN, as the last owner left it: the same tokens, and logits to the bit."""
    c = case(name)
    first, *prompts = c.prompts(
        [40, 1, 15, 16, 17, c.topk - 1, c.topk + 1, 4 * c.topk + 5, 33], seed=9
    )
    results = []
    for filling in (0.0, torch.nan):
        recorder = Recorder(load_runner(c.artifact, EngineOptions(num_gpu_blocks_override=80)))
        engine = Engine(recorder, EngineOptions(max_num_batched_tokens=29))
        run(engine, [first], greedy(1))  # keeps block 0, where clamped indices would lead
        recorder.logits = []
        for layer in recorder.caches.values():
            for cache in layer.values():
                cache.fill_(filling)
        results.append((run(engine, prompts, greedy(20)), torch.cat(recorder.logits)))
    (clean, clean_logits), (poisoned, poisoned_logits) = results
    assert poisoned == clean
    assert torch.equal(poisoned_logits, clean_logits)


@pytest.mark.slow
@pytest.mark.parametrize("step_tokens", [53, 1024])
def test_pages_of_a_failed_request_are_clean_for_the_next(case, load, monkeypatch, step_tokens):
    """A NaN weight row fails every request that holds its token, and only those, in any company."""
    prompts, params, _ = load
    bad = 7
    prompts = [[8 if token == bad else token for token in prompt] for prompt in prompts]
    clean = Engine.load(
        case(NAME).artifact, num_gpu_blocks_override=40, enable_prefix_caching=False
    )
    want = [run(clean, [prompt], params)[0] for prompt in prompts]

    def spoiled(*args: Any) -> weight_loading.Weights:
        weights = load_weights(*args)
        weights["embed"]["embed_tokens.weight"][bad] = torch.nan
        return weights

    load_weights = weight_loading.load_weights
    monkeypatch.setattr(weight_loading, "load_weights", spoiled)
    engine = Engine.load(
        case(NAME).artifact, num_gpu_blocks_override=40, max_num_batched_tokens=step_tokens
    )
    chance = random.Random(10)
    mixed, expected = [], []
    for prompt, tokens in zip(prompts, want, strict=True):
        spoiled = list(prompt)
        spoiled[chance.randrange(len(spoiled))] = bad
        mixed += [spoiled, prompt]
        expected += [None, tokens if bad not in tokens[:-1] else None]
    assert sum(tokens is not None for tokens in expected) > 16
    for _ in range(2):  # the second time over the pages and prefixes of the first
        outs = engine.generate(mixed, params)
        for out, tokens in zip(outs, expected, strict=True):
            if tokens is not None:
                assert out.token_ids == tokens
                continue
            assert out.finish_reason == "error"
            assert repr(out.request_id) in out.error
    assert engine.stats().owned_blocks == 0
