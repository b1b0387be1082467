"""A model's generation_config.json: end tokens, and sampling where a request says nothing."""

import json

import pytest

from dsa_compile.errors import ArtifactError
from dsa_compile.runtime import Engine, EngineOptions, SamplingParams
from dsa_compile.runtime.requests.generation_config import GenerationConfig
from tests.runtime.hash_runner import HashRunner, reference_tokens

VOCAB = 64
# As published with DeepSeek-V3.2, GLM-5's list of end tokens, and greedy.
PUBLISHED = {
    "_from_model_config": True, "bos_token_id": 0, "eos_token_id": 1, "do_sample": True,
    "temperature": 0.6, "top_p": 0.95, "transformers_version": "4.46.3",
}  # fmt: skip


def parsed(content: object) -> GenerationConfig:
    return GenerationConfig.parse(json.dumps(content).encode(), "generation_config.json")


@pytest.mark.parametrize(
    ("content", "eos", "params"),
    [
        (PUBLISHED, (1,), {"temperature": 0.6, "top_p": 0.95}),
        ({"eos_token_id": [5, 6, 7], "temperature": 1.0}, (5, 6, 7), {}),
        ({"do_sample": False, "temperature": 0.6, "top_k": 20}, (), {"temperature": 0.0}),
        ({"temperature": None, "num_beams": 4, "max_new_tokens": 9}, (), {"max_tokens": 9}),
        (
            {"top_k": 50, "min_p": 0.1, "repetition_penalty": 1.1},
            (),
            {"top_k": 50, "min_p": 0.1, "repetition_penalty": 1.1},
        ),
        ({}, (), {}),
    ],
)
def test_fields_that_mean_something_are_taken(content, eos, params):
    assert parsed(content) == GenerationConfig(eos, SamplingParams(**params))


def test_a_model_without_the_file_samples_as_usual():
    assert GenerationConfig.parse(None, "x") == GenerationConfig((), SamplingParams())


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"{", "^g.json: not valid JSON .*; mend the model's file and recompile"),
        (b"[" * 100_000, "^g.json: not valid JSON"),
        (b"[]", "^g.json: should hold a JSON object"),
        (b'{"top_p": 3}', r"^g.json: top_p must be a number in \(0, 1\]; got 3; mend"),
        (b'{"temperature": "hot"}', "^g.json: temperature must be"),
        (b'{"max_new_tokens": 0}', "^g.json: max_new_tokens must be an integer >= 1; got 0"),
        (b'{"top_k": -2, "eos_token_id": -1}', "^g.json: top_k .* got -2; eos_token_id=-1 must"),
        (b'{"eos_token_id": "end"}', "^g.json: eos_token_id='end' must name token ids"),
        (b'{"eos_token_id": [1, true]}', "must name token ids"),
    ],
)
def test_a_broken_file_is_named(data, message):
    with pytest.raises(ArtifactError, match=message):
        GenerationConfig.parse(data, "g.json")


@pytest.mark.parametrize("mode", ["auto", "none"])
def test_an_engine_takes_sampling_if_it_may_and_end_tokens_always(mode):
    prompt = [1, 2, 3]
    tokens = reference_tokens(prompt, 20, VOCAB)
    end = tokens[4]
    spare = next(token for token in range(VOCAB) if token not in tokens)
    config = parsed({"eos_token_id": [end, 10**6], "do_sample": False, "max_new_tokens": 20})
    runner = HashRunner(64, 4, VOCAB, eos_token_ids=(spare,))
    options = EngineOptions(generation_config=mode)
    engine = Engine(runner, options, generation_config=config)
    assert engine.eos_token_ids == (spare, end)  # one beyond the vocabulary means nothing
    wanted = SamplingParams(max_tokens=20, temperature=0.0) if mode == "auto" else SamplingParams()
    assert engine.default_params == wanted
    (own,) = engine.generate([prompt], SamplingParams(max_tokens=20, temperature=0.0))
    assert own.token_ids == tokens[: tokens.index(end) + 1]
    assert own.finish_reason == "stop"
    if mode == "auto":
        assert engine.generate([prompt])[0].token_ids == own.token_ids
        assert list(engine.stream(prompt))[-1].token_ids == own.token_ids
