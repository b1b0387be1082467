"""Options that change or describe logits, and grammars, are sampled ahead like all others."""

import re

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import rule

from dsa_compile.kernels.cuda.device import rehearse
from dsa_compile.runtime import Engine, EngineOptions, Grammar, SamplingParams
from dsa_compile.runtime.execution.runner import StepInputs
from dsa_compile.runtime.loading.kernel_preparation import launch_option_kernels
from dsa_compile.runtime.sampling.device_sampler import DeviceSampler
from dsa_compile.runtime.sampling.sampler import SamplingState
from dsa_compile.runtime.sampling.seen_tokens import SeenTokens, TokenCounts
from tests.runtime.hash_runner import HashRunner
from tests.trained import trained_model

from .async_runner import AsyncHashRunner
from .test_step_pipeline import EOS, FLATNESS, SIZE, VOCAB, EngineMachine, greedy, run, settings_of

ANY = Grammar("regex", "any")


class Follows:
    """A grammar whose allowed tokens depend on all tokens before; the end token always is one."""

    def __init__(self):
        self.tokens = []

    def allowed(self):
        if EOS in self.tokens:
            return list(range(VOCAB))
        total = sum(self.tokens)
        return [t for t in range(VOCAB) if t == EOS or (t * 7 + total) % 3 == 0]

    def fill(self, bitmask, row):
        bitmask[row] = 0
        for token in self.allowed():
            bitmask.view(np.uint32)[row, token // 32] |= np.uint32(1 << token % 32)

    def append(self, token):
        assert token in self.allowed()
        self.tokens.append(token)


class Grammars:
    def compile(self, grammar, eos_ids):
        return Follows


def make_engine(num_blocks=200, **config):
    runner = AsyncHashRunner(num_blocks, SIZE, VOCAB, eos_token_ids=(EOS,))
    runner.flatness = FLATNESS
    engine = Engine(runner, EngineOptions(async_scheduling=True, **config))
    engine._grammars = Grammars()
    return engine, runner


def alone(prompt, params):
    """A request on its own, each step waited for, its tokens chosen on the host."""
    runner = HashRunner(64, SIZE, VOCAB, eos_token_ids=(EOS,))
    execute = runner.execute
    runner.execute = lambda batch: execute(batch) / FLATNESS
    engine = Engine(runner)
    engine._grammars = Grammars()
    return engine.generate([prompt], params)[0]


def test_only_a_grammar_is_sampled_when_the_token_before_is_known():
    """Nothing is launched behind a step that is not sampled."""
    engine, runner = make_engine()
    engine.add_request("a", [1, 2], greedy(4, ignore_eos=True, logprobs=3, presence_penalty=1.0))
    run(engine)
    assert "sample" not in {kind for kind, _ in runner.log}
    runner.log.clear()
    engine.add_request("a", [1, 2], greedy(9, ignore_eos=True))
    engine.add_request("b", [3], SamplingParams(max_tokens=5, seed=1, grammar=ANY))
    first = runner.launches
    run(engine)
    events = [(kind, number - first) for kind, number in runner.log]
    assert events[:7] == [
        ("launch", 0), ("launch", 1), ("wait", 0), ("sample", 1), ("launch", 2), ("wait", 1),
        ("sample", 2),
    ]  # fmt: skip
    assert {kind for kind, _ in events} == {"launch", "sample", "wait"}


def test_a_mixed_batch_leaves_the_greedy_requests_alone():
    engine, runner = make_engine()
    batch = [[n, n + 1, n + 2] for n in range(8)]
    plain = [out.token_ids for out in engine.generate(batch, greedy(12))]
    picky = SamplingParams(
        max_tokens=12, seed=5, grammar=ANY, logprobs=4, repetition_penalty=1.3, logit_bias={3: 2.0}
    )
    outputs = engine.generate([*batch[:7], [9, 9]], [greedy(12)] * 7 + [picky])
    assert [out.token_ids for out in outputs[:7]] == plain[:7]
    want = alone([9, 9], picky)
    assert outputs[7].token_ids == want.token_ids
    assert "run" not in {kind for kind, _ in runner.log}


@pytest.mark.parametrize("pattern", ["(ab|cd)+e", "[0-9]{3}"])
def test_a_compiled_grammar_gives_the_tokens_of_the_host(pattern):
    """End of an answer is seen one step late, when the grammar has ended too."""
    pytest.importorskip("xgrammar")
    path = trained_model() / "tokenizer.json"
    tokenizer = pytest.importorskip("tokenizers").Tokenizer.from_file(str(path))
    vocab, asked = tokenizer.get_vocab_size(), [[n, n + 1] for n in range(9, 14)]
    params = [
        SamplingParams(max_tokens=60, seed=n, temperature=2.0, grammar=Grammar("regex", pattern))
        for n in range(5)
    ]
    ahead, host = AsyncHashRunner(200, SIZE, vocab), HashRunner(200, SIZE, vocab)
    texts = []
    for runner, overlap in ((ahead, True), (host, False)):
        runner.eos_token_ids = (2,)
        engine = Engine(runner, EngineOptions(async_scheduling=overlap), tokenizer)
        outputs = engine.generate(asked, params)
        texts.append([(out.text, out.finish_reason) for out in outputs])
    assert texts[0] == texts[1]
    assert all(re.fullmatch(pattern, t) for t, reason in texts[0] if reason == "stop")
    assert "stop" in {reason for _, reason in texts[0]}
    assert {kind for kind, _ in ahead.log} == {"launch", "sample", "wait"}


OPTIONS = st.fixed_dictionaries(
    {"seed": st.integers(0, 9)},
    optional={
        "temperature": st.sampled_from([0.0, 0.7, 1.5]),
        "top_k": st.integers(1, VOCAB + 1),
        "top_p": st.floats(0.1, 1.0),
        "min_p": st.floats(0.0, 0.3),
        "repetition_penalty": st.floats(0.5, 2.0),
        "presence_penalty": st.floats(-2.0, 2.0),
        "frequency_penalty": st.floats(-2.0, 2.0),
        "logit_bias": st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-9.0, 9.0), max_size=6),
        "logprobs": st.integers(0, 40),
        "min_tokens": st.integers(1, 6),
        "stop_token_ids": st.lists(st.integers(0, VOCAB - 1), max_size=2),
        "grammar": st.just(ANY),
    },
)


class OptionsMachine(EngineMachine):
    """Random options, chunks of prompts, preemption, aborts and failures: tokens of the host."""

    def make(self, num_blocks, **config):
        self.described = {}
        return make_engine(num_blocks, **config)

    @rule(
        stem=st.integers(0, 2), length=st.integers(1, 24), most=st.integers(1, 14), options=OPTIONS
    )
    def add(self, stem, length, most, options):
        if "grammar" in options:
            options.pop("min_tokens", None)
        prompt = np.random.default_rng(stem).integers(0, VOCAB, length).tolist()
        name = f"r{len(self.asked)}"
        most = max(most, options.get("min_tokens", 0))
        self.asked[name] = prompt, SamplingParams(max_tokens=most, **options)
        self.engine.add_request(name, *self.asked[name])
        self.streamed[name] = []

    def take(self, outputs):
        super().take(outputs)
        for output in outputs:
            self.described[output.request_id] = output.logprobs

    def alone(self, prompt, params):
        return alone(prompt, params).token_ids

    def teardown(self):
        super().teardown()
        for name, (prompt, params) in getattr(self, "asked", {}).items():
            if params.logprobs is None or name not in self.described:
                continue
            got = self.described[name] or []
            for a, b in zip(got, alone(prompt, params).logprobs, strict=False):
                assert (a.token_id, a.rank) == (b.token_id, b.rank)
                assert [t for t, _ in a.top] == [t for t, _ in b.top]
                assert [a.logprob, *(v for _, v in a.top)] == pytest.approx(
                    [b.logprob, *(v for _, v in b.top)], abs=1e-5
                )


TestOptions = OptionsMachine.TestCase
TestOptions.settings = settings_of(40)


def special_states(vocab):
    """One request for each option, and one for all."""
    options = [
        {"temperature": 0.0},
        {"presence_penalty": 0.5, "repetition_penalty": 1.1, "frequency_penalty": 0.1},
        {"logit_bias": {5: 1.0}},
        {"min_tokens": 9},
        {"logprobs": 20},
    ]
    states = [
        SamplingState(SamplingParams(max_tokens=99, **one), [1, 2], [EOS], vocab) for one in options
    ]
    both = SamplingParams(max_tokens=99, logprobs=3, presence_penalty=0.5, logit_bias={5: 1.0})
    states.append(SamplingState(both, [1, 2], [EOS], vocab, Follows()))
    for state in states:
        state.append(6)
    return states


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [64, 154_880])
def test_nothing_is_read_from_the_device_before_it_is_waited_for(dtype, vocab):
    """On tensors without memory, which nobody can read, for the launches of a GPU."""
    rows = 70
    sampler = DeviceSampler(vocab, torch.zeros(rows, dtype=torch.int64, device="meta"))
    for slot in sampler._slots:
        slot.logprobs = slot.logprobs.to("meta")
    states = special_states(vocab) * 11
    count = len(states)
    logits = torch.empty(count, vocab, dtype=dtype, device="meta")
    inputs = StepInputs(None, list(range(count)), states, [2] * count, [1] * count, True)
    with rehearse("sm_90a") as noted:
        tokens = sampler.launch(logits, inputs)
        assert not noted.kernels, "its grammars wait for a token"
        tokens.sample()
    with rehearse("sm_90a") as ready:
        launch_option_kernels(vocab)
    assert noted.triton.keys() <= ready.triton.keys(), "a kernel that loading does not make ready"
    assert {kernel.name for kernel in noted.kernels} == {"sample_tokens"}
    names = {launch.function.__name__ for launch in noted.triton.values()}
    assert names == {
        "store_seen_kernel", "change_rows_kernel", "bias_tokens_kernel", "describe_blocks_kernel",
        "join_blocks_kernel",
    }  # fmt: skip


def test_more_changed_rows_than_one_turn_takes():
    vocab, rows = 32, 150
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(rows, vocab, generator=generator)
    states = [
        SamplingState(
            SamplingParams(temperature=0.0, logit_bias={n % vocab: 100.0}), [1], [EOS], vocab
        )
        for n in range(rows)
    ]
    last = torch.zeros(rows, dtype=torch.int64)
    inputs = StepInputs(None, list(range(rows)), states, [0] * rows, [1] * rows, True)
    results = DeviceSampler(vocab, last).launch(logits, inputs).wait().results
    want = [n % vocab for n in range(rows)]
    assert [tokens[0] for tokens in results] == want
    assert last.tolist() == want


def test_a_copy_of_counts_goes_on_by_itself():
    counts = TokenCounts([3])
    counts.append(4)
    counts.copy().append(5)
    tokens, states = counts.changes(0)
    assert (counts.num_output, tokens.tolist(), states.tolist()) == (1, [4], [1])


def test_a_row_of_seen_tokens_follows_its_request():
    seen = SeenTokens(2, 10, torch.device("cpu"))

    def update(count, written=True):
        rows, tokens, states = seen.changes([1], [count])
        assert len(set(tokens.tolist())) == len(tokens)
        if written:
            seen.table[rows, tokens] = torch.from_numpy(states.astype(np.uint16).view(np.int16))
            seen.written([1], [count])
        return len(tokens)

    def counts():
        return (seen.table[1].int() & 0x7FFF).tolist()

    first, second = TokenCounts([3, 3, 4]), TokenCounts([5])
    first.append(4)
    assert update(first) == 2
    assert (seen.table[1] < 0).nonzero().flatten().tolist() == [3, 4]
    assert counts() == [0, 0, 0, 0, 1, 0, 0, 0, 0, 0]
    for token in (4, 4, 6):
        first.append(token)
    assert update(first) == 2, "only what is new"
    assert counts() == [0, 0, 0, 0, 3, 0, 1, 0, 0, 0]
    assert update(first) == 0
    assert update(second, written=False) == 1
    assert update(first) == 3, "all of it, for the row was another's"
    assert counts() == [0, 0, 0, 0, 3, 0, 1, 0, 0, 0]
    assert (seen.table[0] == 0).all()
