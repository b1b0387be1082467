"""Log-probabilities of prompts: each row is computed once, be it cached, cut or preempted."""

import numpy as np
import pytest
import torch

from dsa_compile.errors import ParameterError
from dsa_compile.runtime import Engine, EngineOptions, SamplingParams
from tests.runtime.async_runner import AsyncHashRunner
from tests.runtime.hash_runner import HashRunner, reference_tokens

SIZE, VOCAB = 4, 64


def params(**options) -> SamplingParams:
    return SamplingParams(max_tokens=3, temperature=0.0, **options)


def expected(prompt: list[int]) -> list[tuple[int, bool]]:
    """Each token but the first, and whether it is the one that those before it give."""
    return [
        (token, reference_tokens(prompt[:end], 1, VOCAB) == [token])
        for end, token in enumerate(prompt)
        if end
    ]


def found(output) -> list[tuple[int, bool]]:
    return [(entry.token_id, entry.rank == 1) for entry in output.prompt_logprobs]


def likely(length: int, start: int) -> list[int]:
    """A prompt that is partly what the runner gives."""
    prompt = [start]
    while len(prompt) < length:
        prompt += [*reference_tokens(prompt, 3, VOCAB), len(prompt) % VOCAB]
    return prompt[:length]


PROMPTS = [likely(length, length) for length in (1, 2, 5, 16, 17, 40, 41)]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("budget", [4, 16, 64])
@pytest.mark.parametrize("ahead", [False, True])
def test_every_position_is_scored_once(budget: int, ahead: bool, deterministic: bool) -> None:
    made = AsyncHashRunner if ahead else HashRunner
    runner = made(64, SIZE, VOCAB, 2000)
    options = EngineOptions(
        max_num_batched_tokens=budget, max_num_seqs=8, deterministic=deterministic
    )
    engine = Engine(runner, options)
    for _ in range(2):  # from the prefix cache, the second time
        wants = [params(prompt_logprobs=n % 3 if n != 4 else None) for n in range(len(PROMPTS))]
        outputs = engine.generate(PROMPTS, wants)
        for n, (prompt, output) in enumerate(zip(PROMPTS, outputs, strict=True)):
            assert output.token_ids == reference_tokens(prompt, 3, VOCAB)
            if n == 4:
                assert output.prompt_logprobs is None
                continue
            assert found(output) == expected(prompt)
            assert {len(entry.top) for entry in output.prompt_logprobs} <= {n % 3}
            assert output.cached_tokens == 0
    assert engine.stats().owned_blocks == 0


def test_a_preempted_request_is_scored_once() -> None:
    """In the middle of its prompt: what was scored before is not computed again."""
    runner = HashRunner(17, SIZE, VOCAB, 2000)
    engine = Engine(runner, EngineOptions(max_num_batched_tokens=8))
    batch, lengths = [likely(8, 1), likely(55, 2)], [24, 5]
    wanted = [
        SamplingParams(max_tokens=count, temperature=0.0, prompt_logprobs=0) for count in lengths
    ]
    outputs = engine.generate(batch, wanted)
    assert engine.stats().preemptions == 1
    assert engine.stats().prefix_hit_tokens > 0
    for prompt, output, count in zip(batch, outputs, lengths, strict=True):
        assert found(output) == expected(prompt)
        assert output.token_ids == reference_tokens(prompt, count, VOCAB)


def test_other_requests_reuse_what_was_scored() -> None:
    engine = Engine(HashRunner(64, SIZE, VOCAB, 2000))
    prompt = likely(40, 3)
    first, second = engine.generate([prompt], params(prompt_logprobs=0)) + engine.generate(
        [prompt], params()
    )
    assert (first.cached_tokens, second.cached_tokens) == (0, 36)


def test_a_stream_has_them_once() -> None:
    engine = Engine(HashRunner(64, SIZE, VOCAB, 2000), EngineOptions(max_num_batched_tokens=8))
    outputs = list(engine.stream(PROMPTS[5], params(prompt_logprobs=1)))
    assert [len(output.new_prompt_logprobs) for output in outputs] == [39, 0, 0]
    assert len(outputs[0].to_dict()["prompt_logprobs"]) == 39


def test_a_number_of_alternatives_is_a_number() -> None:
    with pytest.raises(ParameterError, match="prompt_logprobs"):
        SamplingParams(prompt_logprobs=-1)


def test_scores_are_those_of_the_logits() -> None:
    (output,) = Engine(HashRunner(64, SIZE, VOCAB, 2000)).generate(
        [PROMPTS[3]], params(prompt_logprobs=2)
    )
    likeliest = 10 - np.log(np.exp(10) + VOCAB - 1)
    for entry in output.prompt_logprobs:
        own = likeliest - (0 if entry.rank == 1 else 10)
        torch.testing.assert_close(entry.logprob, float(own), rtol=1e-5, atol=1e-5)
        assert [round(value - likeliest) for _, value in entry.top] == [0, -10]
