import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsa_compile.errors import RequestError, UserError
from dsa_compile.runtime import Engine, EngineOptions, SamplingParams
from tests.runtime.hash_runner import HashRunner, reference_tokens

SIZE = 4
VOCAB = 64
EOS = 7


def greedy(max_tokens: int = 8, **options) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, **options)


def make_engine(num_blocks=256, tokenizer=None, nan_token=None, eos=(), **config) -> Engine:
    runner = HashRunner(num_blocks, SIZE, VOCAB, 2000, eos, nan_token)
    return Engine(runner, EngineOptions(**config), tokenizer)


def prompts(count: int, longest: int, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, longest + 1, count)
    return [rng.integers(0, VOCAB, length).tolist() for length in lengths]


def run(engine: Engine) -> dict[str, object]:
    done = {}
    while engine.has_unfinished():
        done |= {out.request_id: out for out in engine.step() if out.finished}
    assert engine.stats().owned_blocks == 0
    return done


class Letters:
    """A tokenizer with one letter a token."""

    def encode(self, text):
        return SimpleNamespace(ids=[ord(c) - ord("A") for c in text])

    def decode(self, ids, skip_special_tokens=True):
        return "".join(chr(ord("A") + i) for i in ids)


def test_generate_returns_exact_tokens_in_order():
    engine = make_engine(max_num_batched_tokens=16, max_num_seqs=8)
    batch = prompts(32, 40)
    outputs = engine.generate(batch, [greedy(1 + i % 12) for i in range(32)])
    for i, (prompt, output) in enumerate(zip(batch, outputs, strict=True)):
        assert output.prompt_token_ids == prompt
        assert output.token_ids == reference_tokens(prompt, 1 + i % 12, VOCAB)
        assert (output.finish_reason, output.text, output.error) == ("length", None, None)
    assert engine.stats().owned_blocks == 0


def test_an_end_token_ends_a_request_unless_ignored():
    engine = make_engine(eos=(EOS,))
    batch = prompts(20, 12)
    want = [reference_tokens(p, 60, VOCAB) for p in batch]
    ends = [w.index(EOS) if EOS in w else None for w in want]
    assert any(end is not None for end in ends)
    for output, tokens, end in zip(engine.generate(batch, greedy(60)), want, ends, strict=True):
        assert output.token_ids == (tokens if end is None else tokens[: end + 1])
        assert output.finish_reason == ("length" if end is None else "stop")
    ignoring = engine.generate(batch, greedy(60, ignore_eos=True))
    assert [output.token_ids for output in ignoring] == want


def test_a_pool_four_times_too_small_gives_the_same_tokens():
    batch = prompts(24, 40)
    needed = sum(-(-(len(p) + 20) // SIZE) for p in batch)
    ample = make_engine(needed).generate(batch, greedy(20))
    tight = make_engine(needed // 4)
    assert [o.token_ids for o in tight.generate(batch, greedy(20))] == [o.token_ids for o in ample]
    assert tight.stats().preemptions > 0


def test_a_warm_prefix_gives_the_tokens_of_a_cold_one():
    engine = make_engine()
    prompt = prompts(1, 1)[0] + list(range(30))
    cold, warm = (engine.generate([prompt], greedy())[0] for _ in range(2))
    assert (cold.cached_tokens, warm.cached_tokens) == (0, 28)
    assert engine.stats().prefix_hit_tokens == 28
    assert cold.token_ids == warm.token_ids


def test_index_pages_dropped_at_random_shorten_hits_and_change_no_token():
    chance = random.Random(0)
    engine = make_engine(64)
    prompt, hits = list(range(40)), set()
    for _ in range(20):
        output = engine.generate([prompt], greedy(6))[0]
        assert output.token_ids == reference_tokens(prompt, 6, VOCAB)
        hits.add(output.cached_tokens)
        for block in chance.sample(range(64), 4):
            engine.scheduler.lose_page(block)
            engine._runner.lose_page(1, block)
    assert len(hits) > 3


def test_sampled_tokens_do_not_depend_on_preemption_or_company():
    class Flat(HashRunner):
        def execute(self, batch):
            return super().execute(batch) / 5

    params = [SamplingParams(max_tokens=15, seed=i, logprobs=1) for i in range(12)]
    batch = prompts(12, 30)
    alone = [
        Engine(Flat(64, SIZE, VOCAB)).generate([p], q)[0]
        for p, q in zip(batch, params, strict=True)
    ]
    engine = Engine(Flat(24, SIZE, VOCAB), EngineOptions(max_num_batched_tokens=16))
    crowd = engine.generate(batch, params)
    assert engine.stats().preemptions > 0
    assert [o.token_ids for o in crowd] == [o.token_ids for o in alone]
    assert all(o.token_ids == [e.token_id for e in o.logprobs] for o in crowd)


def test_step_by_step_outputs_grow_and_do_not_change_afterwards():
    engine = make_engine(max_num_batched_tokens=8)
    for i, prompt in enumerate(prompts(5, 20)):
        engine.add_request(f"r{i}", prompt, greedy(4))
    seen: dict[str, list] = {}
    while engine.has_unfinished():
        for output in engine.step():
            seen.setdefault(output.request_id, []).append(output)
    for outputs in seen.values():
        assert [len(o.token_ids) for o in outputs] == [1, 2, 3, 4]
        assert [o.finished for o in outputs] == [False, False, False, True]
        assert outputs[0].token_ids == outputs[-1].token_ids[:1]
    assert len(seen) == 5
    assert engine.step() == []


def test_urgent_requests_run_first():
    engine = make_engine(max_num_seqs=1)
    for name, priority in (("later", 1), ("urgent", 0)):
        engine.add_request(name, [1, 2, 3], greedy(2), priority)
    assert list(run(engine)) == ["urgent", "later"]


def test_abort_returns_what_there_is():
    engine = make_engine()
    engine.add_request("a", [1, 2, 3], greedy(8))
    engine.add_request("b", [4, 5], greedy(8))
    first = next(o for o in engine.step() if o.request_id == "a")
    aborted = engine.abort("a")
    assert (aborted.finish_reason, aborted.token_ids) == ("abort", first.token_ids)
    assert engine.abort("a") is None
    assert run(engine)["b"].token_ids == reference_tokens([4, 5], 8, VOCAB)


def test_abort_while_the_model_runs():
    engine = make_engine()
    execute = engine._runner.execute

    def interrupted(batch):
        engine._runner.execute = execute
        assert engine.abort("b").finish_reason == "abort"
        engine.add_request("b", [9, 9], greedy(3))
        return execute(batch)

    for name, prompt in (("a", [1, 2, 3]), ("b", [4, 5, 6]), ("c", [7, 8])):
        engine.add_request(name, prompt, greedy(3))
    engine._runner.execute = interrupted
    assert [o.request_id for o in engine.step()] == ["a", "c"]
    done = run(engine)
    for name, prompt in (("a", [1, 2, 3]), ("b", [9, 9]), ("c", [7, 8])):
        assert done[name].token_ids == reference_tokens(prompt, 3, VOCAB)


def test_nan_logits_fail_their_request_alone():
    engine = make_engine(nan_token=VOCAB - 1)
    batch = [[1, 2, 3], [4] * 9 + [VOCAB - 1], [6, 6]]
    outputs = engine.generate(batch, greedy(4))
    bad = outputs.pop(1)
    assert bad.finish_reason == "error"
    assert bad.request_id in bad.error
    assert "NaN" in bad.error
    assert (bad.token_ids, engine.stats().owned_blocks) == ([], 0)
    for output, prompt in zip(outputs, [batch[0], batch[2]], strict=True):
        assert output.token_ids == reference_tokens(prompt, 4, VOCAB)
    assert engine.generate([[4] * 9 + [6]], greedy(1))[0].cached_tokens == 0


def test_a_step_that_raises_is_undone_and_can_be_tried_again():
    engine = make_engine()
    execute = engine._runner.execute

    def broken(batch):
        raise RuntimeError("device lost")

    engine.add_request("a", [1, 2, 3], greedy(4))
    engine.step()
    engine._runner.execute = broken
    with pytest.raises(RuntimeError, match="device lost"):
        engine.step()
    engine._runner.execute = execute
    assert run(engine)["a"].token_ids == reference_tokens([1, 2, 3], 4, VOCAB)

    engine._runner.execute = broken
    with pytest.raises(RuntimeError, match="device lost"):
        engine.generate([[1, 2, 3]])
    engine._runner.execute = execute
    assert not engine.has_unfinished()
    assert engine.stats().owned_blocks == 0
    assert engine.generate([[1, 2]], greedy(2))[0].token_ids == reference_tokens([1, 2], 2, VOCAB)


def test_texts_need_a_tokenizer_and_come_back_as_texts():
    output = make_engine(tokenizer=Letters()).generate(["ABC"], greedy(5))[0]
    assert output.prompt_token_ids == [0, 1, 2]
    assert output.token_ids == reference_tokens([0, 1, 2], 5, VOCAB)
    assert output.text == Letters().decode(output.token_ids)
    with pytest.raises(RequestError, match="needs a tokenizer and this engine has none"):
        make_engine().generate(["ABC"])


def test_an_aborted_request_gives_the_text_it_held_back():
    engine = make_engine(tokenizer=Letters())
    tokens = reference_tokens([1, 2], 2, VOCAB)
    engine.add_request("r", [1, 2], greedy(5, stop=Letters().decode([tokens[0]]) + "?never"))
    assert engine.step()[0].text == ""
    assert engine.abort("r").text == Letters().decode(tokens[:1])


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "the prompt is empty"),
        ([1, VOCAB], f"token id {VOCAB} is out of range; the model's ids are 0 to {VOCAB - 1}"),
        ([-1, 1], "token id -1 is out of range"),
        ([2**70], f"token id {2**70} is out of range"),
        ([1, 2**63], f"token id {2**63} is out of range"),
        ([1.5], "a list of integer token ids"),
        ([True, False], "a list of integer token ids"),
        (["a"], "a list of integer token ids"),
        ([[1], [2, 3]], "a list of integer token ids"),
        ([[1, 2]], "a list of integer token ids"),
        (5, "a list of integer token ids"),
        (None, "a list of integer token ids"),
        ({1: 2}, "a list of integer token ids"),
        ([1] * 1020, "prompt of 1020 tokens .*limit of 1000 tokens"),
        ([1] * 1024, "prompt of 1024 tokens .*limit of 1000 tokens"),
        ([1] * 995, "995 prompt tokens .* max_tokens=8 exceed .*use max_tokens <= 5"),
    ],
)
def test_a_bad_prompt_is_refused_with_its_request_named(prompt, message):
    engine = make_engine(max_model_len=1000)
    with pytest.raises(RequestError, match=f"request 'generate-1-1': .*{message}") as raised:
        engine.generate([[1, 2], prompt], greedy())
    assert "\n" not in str(raised.value)
    assert not engine.has_unfinished()


def test_other_bad_calls_are_refused():
    engine = make_engine()
    engine.add_request("taken", [1], greedy())
    for call, message in (
        (lambda: engine.add_request("taken", [1], greedy()), "'taken' is already in progress"),
        (lambda: engine.add_request(7, [1], greedy()), "id 7 must be a string"),
        (lambda: engine.add_request("r", [1], {"max_tokens": 3}), "must be SamplingParams"),
        (lambda: engine.add_request("r", [1], greedy(), priority="high"), "must be an integer"),
        (lambda: engine.add_request("r", [1], greedy(10**12)), "use max_tokens <= "),
        (lambda: engine.generate([[1]]), "needs an idle engine"),
        (lambda: engine.generate("text"), "must be a list of prompts"),
        (lambda: engine.generate([[1], [2]], [greedy()]), "2 prompts but 1 sampling parameters"),
    ):
        with pytest.raises(RequestError, match=message):
            call()
    assert list(run(engine)) == ["taken"]


def test_limits_are_checked_against_the_model():
    with pytest.raises(UserError, match="max_model_len=2001 exceeds the model's limit of 2000"):
        make_engine(max_model_len=2001)
    with pytest.raises(UserError, match="max_num_batched_tokens must be an integer >= 1; got 0"):
        make_engine(max_num_batched_tokens=0)


def test_no_prompts_give_no_outputs():
    assert make_engine().generate([]) == []


def test_arrays_and_tensors_are_prompts_too():
    want = reference_tokens([3, 1, 2], 8, VOCAB)
    for prompt in (np.array([3, 1, 2], np.int32), torch.tensor([3, 1, 2]), (3, 1, 2)):
        assert make_engine().generate([prompt], greedy())[0].token_ids == want


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 12)), min_size=1, max_size=10),
    st.integers(11, 40),
    st.integers(1, 40),
    st.integers(1, 8),
    st.booleans(),
)
def test_limits_never_change_tokens(sizes, num_blocks, budget, max_num_seqs, reuse):
    engine = make_engine(
        num_blocks,
        max_num_batched_tokens=budget,
        max_num_seqs=max_num_seqs,
        enable_prefix_caching=reuse,
    )
    batch = [np.random.default_rng(n % 3).integers(0, VOCAB, n).tolist() for n, _ in sizes]
    outputs = engine.generate(batch, [greedy(m) for _, m in sizes])
    for prompt, (_, max_tokens), output in zip(batch, sizes, outputs, strict=True):
        assert output.token_ids == reference_tokens(prompt, max_tokens, VOCAB)
