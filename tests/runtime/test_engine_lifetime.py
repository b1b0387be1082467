"""Lifetime of an engine: what it shows of itself, and what closing it does."""

import json
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from dsa_compile.errors import UserError
from dsa_compile.runtime import Engine, EngineOptions, SamplingParams
from tests.runtime.hash_runner import HashRunner, reference_tokens

from .async_runner import AsyncHashRunner
from .test_engine import Letters

GREEDY = SamplingParams(max_tokens=8, temperature=0.0)
VOCAB = 64


def make(**options) -> Engine:
    return Engine(HashRunner(32, 4, VOCAB, 500), EngineOptions(**options))


def test_it_shows_what_it_does():
    engine = make(max_num_seqs=1)
    assert repr(engine) == "<Engine over HashRunner: 0 of 32 blocks used, 0 running, 0 waiting>"
    engine.add_request("a", [1, 2, 3], GREEDY)
    engine.add_request("b", [1, 2, 3], GREEDY)
    engine.step()
    assert repr(engine) == "<Engine over HashRunner: 1 of 32 blocks used, 1 running, 1 waiting>"
    assert engine.options == EngineOptions(max_num_seqs=1)
    assert (engine.tokenizer, engine.vocab_size, engine.eos_token_ids) == (None, VOCAB, ())


def test_a_closed_engine_says_so():
    with make() as engine:
        engine.generate([[1, 2]], GREEDY)
        engine.add_request("left", [1, 2, 3], GREEDY)
    assert engine.closed
    assert repr(engine) == "<Engine over HashRunner: closed>"
    engine.close()
    for use in (
        lambda: engine.generate([[1]], GREEDY),
        lambda: engine.stream([1], GREEDY),
        lambda: engine.add_request("a", [1], GREEDY),
        engine.step,
        engine.drain,
        lambda: engine.abort("left"),
        engine.has_unfinished,
        engine.stats,
    ):
        with pytest.raises(UserError, match=r"this engine is closed \(over HashRunner\); load"):
            use()


@pytest.mark.parametrize("runner", [HashRunner, AsyncHashRunner])
def test_closing_lets_go_of_the_runner(runner):
    made = runner(64, 4, VOCAB)
    engine = Engine(made, EngineOptions())
    engine.add_request("a", [1, 2, 3], GREEDY)
    engine.step()  # with a step in flight, where there can be one
    gone = weakref.ref(made)
    del made
    engine.close()
    assert gone() is None


def test_closing_goes_on_after_an_error_in_the_block():
    with pytest.raises(RuntimeError, match="mine"), make() as engine:
        raise RuntimeError("mine")
    assert engine.closed


def test_an_output_as_plain_data_and_in_short():
    engine = Engine(HashRunner(32, 4, 26, 500), EngineOptions(), Letters())
    params = SamplingParams(max_tokens=12, temperature=0.0, logprobs=1)
    (output,) = engine.generate([[1, 2, 3]], params)
    data = json.loads(output.to_json())
    tokens = reference_tokens([1, 2, 3], 12, 26)
    assert data["token_ids"] == tokens
    assert data["text"] == output.text
    assert data["prompt_token_ids"] == [1, 2, 3]
    assert [entry["token_id"] for entry in data["logprobs"]] == tokens
    assert data["finish_reason"] == "length"
    assert data["request_id"] == output.request_id
    ids = ", ".join(map(str, tokens[:8]))
    assert repr(output) == (
        f"RequestOutput('generate-1-0', text={output.text!r}, token_ids=[{ids}, … 12 in all], "
        "finish_reason='length')"
    )


class Encoding(dict):
    """A mapping as tokenizers of transformers return."""


@pytest.mark.parametrize(
    "prompt",
    [
        np.array([1, 2, 3]),
        np.array([[1, 2, 3]]),
        torch.tensor([1, 2, 3]),
        torch.tensor([[1, 2, 3]]),
        Encoding(input_ids=[1, 2, 3], attention_mask=[1, 1, 1]),
        Encoding(input_ids=[[1, 2, 3]]),
        Encoding(input_ids=torch.tensor([[1, 2, 3]])),
        (1, 2, 3),
    ],
)
def test_token_ids_in_whatever_holds_them(prompt):
    (output,) = make().generate([prompt], GREEDY)
    assert output.prompt_token_ids == [1, 2, 3]
    assert output.token_ids == reference_tokens([1, 2, 3], 8, VOCAB)


def test_what_a_chat_template_of_transformers_gives_is_a_prompt():
    from transformers import BatchEncoding

    (output,) = make().generate([BatchEncoding({"input_ids": [1, 2, 3]})], GREEDY)
    assert output.prompt_token_ids == [1, 2, 3]


def test_parameters_that_a_request_does_not_bring_are_the_engines():
    engine = make()
    assert engine.default_params == SamplingParams()
    engine.add_request("a", [1, 2, 3])
    while engine.has_unfinished():
        outputs = engine.step()
    assert outputs[0].num_tokens == SamplingParams().max_tokens


def test_generate_in_two_threads_is_refused_and_spoils_nothing():
    began, may_end = threading.Event(), threading.Event()

    class Held(HashRunner):
        def launch(self, inputs):
            began.set()
            assert may_end.wait(60)
            return super().launch(inputs)

    engine = Engine(Held(32, 4, VOCAB, 500), EngineOptions())
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(engine.generate, [[1, 2, 3]], GREEDY)
        assert began.wait(60)
        with pytest.raises(UserError, match=r"runs in another thread.*use AsyncEngine"):
            engine.generate([[4, 5]], GREEDY)
        may_end.set()
        assert first.result(60)[0].token_ids == engine.generate([[1, 2, 3]], GREEDY)[0].token_ids
