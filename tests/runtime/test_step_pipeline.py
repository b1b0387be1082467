"""Steps that overlap give the tokens of steps that do not."""

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dsa_compile.errors import UserError
from dsa_compile.kernels.sampling_layout import MOST_TOP
from dsa_compile.runtime import Engine, EngineOptions, SamplingParams
from tests.runtime.hash_runner import HashRunner, reference_tokens

from .async_runner import AsyncHashRunner, LaunchError, ResultError

SIZE = 4
VOCAB = 48
EOS = 7
FLATNESS = 4.0


def make_engine(num_blocks=200, **config):
    runner = AsyncHashRunner(num_blocks, SIZE, VOCAB, eos_token_ids=(EOS,))
    return Engine(runner, EngineOptions(async_scheduling=True, **config)), runner


def greedy(max_tokens=8, **options):
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, **options)


def run(engine):
    done = {}
    while engine.has_unfinished():
        done |= {out.request_id: out for out in engine.step() if out.finished}
    assert engine.stats().owned_blocks == 0
    return done


def alone(prompt, params, flatness=1.0):
    """Tokens of a request on its own, a step at a time, its tokens chosen on the host."""
    runner = HashRunner(64, SIZE, VOCAB, eos_token_ids=(EOS,))
    execute = runner.execute
    runner.execute = lambda batch: execute(batch) / flatness
    return Engine(runner).generate([prompt], params)[0].token_ids


def test_the_next_step_is_launched_before_the_last_is_waited_for():
    engine, runner = make_engine()
    output = engine.generate([[1, 2, 3]], greedy(5, ignore_eos=True))[0]
    assert output.token_ids == reference_tokens([1, 2, 3], 5, VOCAB)
    expected = [("launch", 0)]
    for number in range(1, 5):
        expected += [("launch", number), ("wait", number - 1)]
    assert runner.log == [*expected, ("wait", 4)]


def test_an_end_is_seen_one_step_late_and_its_extra_token_dropped():
    ending = (reference_tokens([n], 12, VOCAB, (EOS,)) for n in range(VOCAB))
    prompt, want = next(([n], want) for n, want in enumerate(ending) if 3 <= len(want) < 12)
    engine, runner = make_engine()
    engine.add_request("a", prompt, greedy(12))
    outputs = []
    while engine.scheduler.has_unfinished():
        outputs += engine.step()
    assert [o.new_token_ids for o in outputs] == [[t] for t in want]
    assert outputs[-1].finish_reason == "stop"
    assert engine.has_unfinished(), "one step is in flight"
    assert engine.step() == []
    assert not engine.has_unfinished()
    assert len([1 for kind, _ in runner.log if kind == "launch"]) == len(want) + 1
    assert engine.stats().owned_blocks == 0


def test_a_request_for_the_host_is_run_alone_and_exactly():
    """The steps around it overlap again."""
    engine, runner = make_engine()
    engine.add_request("a", [1, 2, 3], greedy(12, ignore_eos=True))
    engine.step()
    engine.add_request("b", [4, 5], greedy(3, logprobs=MOST_TOP + 1, ignore_eos=True))
    done = run(engine)
    assert done["a"].token_ids == reference_tokens([1, 2, 3], 12, VOCAB)
    assert done["b"].token_ids == reference_tokens([4, 5], 3, VOCAB)
    assert [e.token_id for e in done["b"].logprobs] == done["b"].token_ids
    kinds = "".join(kind[0] for kind, _ in runner.log)
    assert kinds.count("r") == 3, "b's steps"
    assert "rrrl" in kinds, "a overlaps afterwards"
    before = kinds[: kinds.index("r")]
    assert before.count("l") == before.count("w"), "what came before b's steps was waited for"


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.3},
        {"presence_penalty": 0.5, "frequency_penalty": 0.5},
        {"logit_bias": {3: 2.0, 9: -1.0}},
        {"min_tokens": 4},
        {"logprobs": 1},
        {"top_k": 5, "top_p": 0.9, "min_p": 0.01},
        {"temperature": 2.0},
    ],
)
def test_options_give_the_tokens_of_the_host(options):
    engine, runner = make_engine()
    runner.flatness = FLATNESS
    params = [SamplingParams(max_tokens=10, seed=n, **options) for n in range(6)]
    prompts = [[n, n + 1, n + 2] for n in range(6)]
    got = [output.token_ids for output in engine.generate(prompts, params)]
    assert got == [alone(p, q, FLATNESS) for p, q in zip(prompts, params, strict=True)]


def test_a_launch_that_fails_is_told_after_the_results_before_it():
    engine, runner = make_engine()
    engine.add_request("a", [1, 2, 3], greedy(4, ignore_eos=True))
    first = engine.step()  # launches the first two
    runner.failing_launches = 1
    second = engine.step()
    with pytest.raises(LaunchError):
        engine.step()
    third = engine.step()
    got = [t for outputs in (first, second, third) for o in outputs for t in o.new_token_ids]
    assert got == reference_tokens([1, 2, 3], 4, VOCAB)[: len(got)]
    assert run(engine)["a"].token_ids == reference_tokens([1, 2, 3], 4, VOCAB)


def test_a_result_that_fails_undoes_all_in_flight():
    engine, runner = make_engine()
    engine.add_request("a", [1, 2, 3], greedy(6, ignore_eos=True))
    engine.step()
    runner.failing_results = 1
    with pytest.raises(ResultError):
        engine.step()
    assert not engine.scheduler._in_flight
    engine.scheduler.check()
    assert run(engine)["a"].token_ids == reference_tokens([1, 2, 3], 6, VOCAB)


def test_generate_leaves_nothing_behind_when_it_fails():
    engine, runner = make_engine()
    runner.failing_results = 1
    with pytest.raises(ResultError):
        engine.generate([[1, 2, 3], [4]], greedy(6))
    assert not engine.has_unfinished()
    assert engine.stats().owned_blocks == 0
    runner.failing_launches = 1
    with pytest.raises(LaunchError):
        engine.generate([[1, 2, 3], [4]], greedy(6))
    assert not engine.has_unfinished()
    assert engine.generate([[5]], greedy(3, ignore_eos=True))[0].token_ids == reference_tokens(
        [5], 3, VOCAB
    )


def test_an_abort_drops_what_is_in_flight():
    engine, _ = make_engine()
    engine.add_request("a", [1, 2, 3], greedy(9, ignore_eos=True))
    engine.add_request("b", [4, 5], greedy(9, ignore_eos=True))
    engine.step()
    aborted = engine.abort("a")
    assert aborted.token_ids == reference_tokens([1, 2, 3], 1, VOCAB)
    engine.add_request("a", [6], greedy(4, ignore_eos=True))
    done = run(engine)
    assert done["a"].token_ids == reference_tokens([6], 4, VOCAB)
    assert done["b"].token_ids == reference_tokens([4, 5], 9, VOCAB)


def test_drained_pages_may_be_lost():
    engine, runner = make_engine()
    prompt = list(range(20))
    engine.add_request("a", prompt, greedy(9, ignore_eos=True))
    engine.step()
    tokens = [t for output in engine.drain() for t in output.new_token_ids]
    assert len(tokens) == 1
    for block in range(200):
        engine.scheduler.lose_page(block)
        runner.lose_page(0, block)
    assert run(engine)["a"].token_ids == reference_tokens(prompt, 9, VOCAB)


def test_a_row_that_fails_does_so_alone():
    runner = AsyncHashRunner(200, SIZE, VOCAB, nan_token=VOCAB - 1)
    engine = Engine(runner, EngineOptions(async_scheduling=True))
    batch = [[1, 2, 3], [4] * 9 + [VOCAB - 1], [6, 6]]
    good, bad, other = engine.generate(batch, greedy(4))
    assert bad.finish_reason == "error"
    assert "NaN" in bad.error
    assert (bad.token_ids, engine.stats().owned_blocks) == ([], 0)
    assert good.token_ids == reference_tokens(batch[0], 4, VOCAB)
    assert other.token_ids == reference_tokens(batch[2], 4, VOCAB)


def test_what_cannot_overlap_is_refused():
    with pytest.raises(UserError, match="keeps no tokens on its device"):
        Engine(HashRunner(8, SIZE), EngineOptions(async_scheduling=True))
    with pytest.raises(UserError, match="max_num_seqs=9: the runner keeps tokens of 8 requests"):
        Engine(
            AsyncHashRunner(8, SIZE, VOCAB, rows=8),
            EngineOptions(async_scheduling=True, max_num_seqs=9),
        )


def test_on_the_cpu_steps_do_not_overlap_by_themselves():
    runner = AsyncHashRunner(64, SIZE, VOCAB)
    Engine(runner).generate([[1, 2]], greedy(3))
    assert {kind for kind, _ in runner.log} == {"run"}


PARAMS = st.sampled_from(
    [
        {"temperature": 0.0},
        {"temperature": 0.0, "ignore_eos": True},
        {"temperature": 1.5, "seed": 1},
        {"temperature": 1.0, "seed": 2, "top_k": 6, "top_p": 0.9},
        {"temperature": 0.0, "logprobs": 1},
        {"temperature": 0.0, "min_tokens": 3},
        {"seed": 3, "repetition_penalty": 1.2},
    ]
)


def settings_of(examples):
    return settings(
        max_examples=examples,
        stateful_step_count=30,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )


class EngineMachine(RuleBasedStateMachine):
    """Whatever a caller does and whatever fails, tokens are those of a request on its own."""

    @initialize(
        num_blocks=st.integers(14, 60),
        budget=st.integers(1, 40),
        max_num_seqs=st.integers(1, 6),
        reuse=st.booleans(),
        deterministic=st.booleans(),
    )
    def start(self, num_blocks, budget, max_num_seqs, reuse, deterministic):
        self.engine, self.runner = self.make(
            num_blocks,
            max_num_batched_tokens=max(budget, SIZE) if deterministic else budget,
            max_num_seqs=max_num_seqs,
            enable_prefix_caching=reuse,
            deterministic=deterministic,
        )
        self.runner.flatness = FLATNESS
        self.asked: dict[str, tuple[list[int], SamplingParams]] = {}
        self.streamed: dict[str, list[int]] = {}
        self.finished: dict[str, tuple[str, list[int]]] = {}

    def make(self, num_blocks, **config):
        return make_engine(num_blocks, **config)

    @rule(stem=st.integers(0, 2), length=st.integers(1, 24), most=st.integers(1, 14), kind=PARAMS)
    def add(self, stem, length, most, kind):
        prompt = np.random.default_rng(stem).integers(0, VOCAB, length).tolist()
        name = f"r{len(self.asked)}"
        most = max(most, kind.get("min_tokens", 0))
        self.asked[name] = prompt, SamplingParams(max_tokens=most, **kind)
        self.engine.add_request(name, *self.asked[name])
        self.streamed[name] = []

    def take(self, outputs):
        for output in outputs:
            name = output.request_id
            assert name not in self.finished, "an output after the last"
            self.streamed[name] += output.new_token_ids
            assert self.streamed[name] == output.token_ids
            if output.finished:
                self.finished[name] = output.finish_reason, output.token_ids

    @rule(steps=st.integers(1, 5))
    def step(self, steps):
        for _ in range(steps):
            self.take(self.engine.step())

    @rule(which=st.sampled_from(["failing_launches", "failing_results"]), steps=st.integers(1, 3))
    def fail(self, which, steps):
        setattr(self.runner, which, 1)
        for _ in range(steps):
            try:
                self.take(self.engine.step())
            except (LaunchError, ResultError):
                self.engine.scheduler.check()
        setattr(self.runner, which, 0)
        if self.engine._pipeline._error is not None:  # to be told before anything else
            with pytest.raises(LaunchError):
                self.engine.step()

    @precondition(lambda self: self.asked)
    @rule(choice=st.integers(0, 50))
    def abort(self, choice):
        name = f"r{choice % len(self.asked)}"
        output = self.engine.abort(name)
        assert (output is None) == (name in self.finished)
        if output is not None:
            self.take([output])

    @rule()
    def drain(self):
        self.take(self.engine.drain())
        assert not self.engine.scheduler._in_flight

    @invariant()
    def holds(self):
        self.engine.scheduler.check()

    def alone(self, prompt, params):
        return alone(prompt, params, FLATNESS)

    def finish(self):
        for _ in range(6000):
            if not self.engine.has_unfinished():
                break
            self.take(self.engine.step())
        assert self.engine.stats().owned_blocks == 0
        assert self.finished.keys() == self.asked.keys()

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        self.finish()
        for name, (prompt, params) in self.asked.items():
            reason, tokens = self.finished[name]
            want = self.alone(prompt, params)
            assert tokens == (want[: len(tokens)] if reason == "abort" else want)


TestEngine = EngineMachine.TestCase
TestEngine.settings = settings_of(50)
