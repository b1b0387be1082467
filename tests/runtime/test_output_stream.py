"""One request's outputs as an iterator."""

import pytest

from dsa_compile.errors import RequestError
from dsa_compile.runtime import Engine, EngineOptions, SamplingParams
from tests.runtime.hash_runner import HashRunner, reference_tokens

from .async_runner import AsyncHashRunner

VOCAB = 64


def greedy(count: int = 6) -> SamplingParams:
    return SamplingParams(max_tokens=count, temperature=0.0)


@pytest.fixture(params=[HashRunner, AsyncHashRunner])
def engine(request):
    runner = request.param(64, 4, VOCAB)
    return Engine(runner, EngineOptions(async_scheduling=runner.rows_ahead > 0))


def test_new_tokens_come_one_step_at_a_time(engine):
    outputs = list(engine.stream([1, 2, 3], greedy()))
    tokens = [token for output in outputs for token in output.new_token_ids]
    assert tokens == reference_tokens([1, 2, 3], 6, VOCAB)
    assert [output.finish_reason for output in outputs] == [None] * 5 + ["length"]
    while engine.has_unfinished():
        engine.step()
    assert engine.stats().owned_blocks == 0


def test_streams_share_steps_and_each_gets_its_own(engine):
    prompts = [[1, 2, 3], [4, 5], [6] * 9]
    streams = [engine.stream(prompt, greedy()) for prompt in prompts]
    found = [[] for _ in prompts]
    for outputs in zip(*streams, strict=True):
        for tokens, output in zip(found, outputs, strict=True):
            tokens += output.new_token_ids
    assert found == [reference_tokens(prompt, 6, VOCAB) for prompt in prompts]


@pytest.mark.parametrize("how", ["close", "with", "drop", "never begun"])
def test_a_stream_that_is_left_aborts_its_request(engine, how):
    stream = engine.stream([1, 2, 3], greedy(100))
    other = engine.stream([7, 7], greedy(3))
    if how != "never begun":
        next(stream)
    if how == "close":
        stream.close()
        stream.close()
    elif how == "with":
        with stream:
            next(stream)
    if how in ("close", "with"):
        assert list(stream) == []
    del stream
    assert [len(list(other)), engine.stats().running] == [3, 0]
    assert engine.generate([[1, 2, 3]], greedy())[0].finished


def test_an_engine_with_other_requests_is_refused(engine):
    engine.add_request("mine", [1], greedy())
    with pytest.raises(RequestError, match="stream\\(\\) needs an idle engine"):
        engine.stream([1], greedy())
    engine.abort("mine")
    with engine.stream([1], greedy()), pytest.raises(RequestError, match="generate\\(\\) needs"):
        engine.generate([[1]], greedy())


def test_a_stream_of_a_closed_engine_ends_quietly(engine):
    stream = engine.stream([1], greedy())
    engine.close()
    stream.close()
    assert list(stream) == []


def test_a_bad_prompt_is_refused_at_once(engine):
    with pytest.raises(RequestError, match="the prompt is empty"):
        engine.stream([], greedy())
    assert not engine.has_unfinished()
