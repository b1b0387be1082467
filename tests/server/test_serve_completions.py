"""Completions over HTTP equal those of the engine, by the real client."""

import openai
import pytest

from dsa_compile.runtime import Engine, SamplingParams
from tests.server.serving import Server, events

PROMPTS = ["def main(argv=None):", "import os", "class Parser:\n    def"]


def whole(engine: Engine, prompt, **params):
    return engine.generate([prompt], SamplingParams(**params))[0]


@pytest.mark.slow
@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("stop", [None, ["\n\n", "return"], "arg"])
def test_text_is_that_of_the_engine(client: openai.OpenAI, engine: Engine, prompt, stop) -> None:
    expected = whole(engine, prompt, max_tokens=40, temperature=0.0, stop=stop or ())
    options = {"model": "tiny", "prompt": prompt, "max_tokens": 40, "temperature": 0, "stop": stop}
    answer = client.completions.create(**options)
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason) == (expected.text, expected.finish_reason)
    assert answer.usage.completion_tokens == expected.num_tokens
    assert answer.usage.prompt_tokens == len(expected.prompt_token_ids)

    chunks = list(
        client.completions.create(**options, stream=True, stream_options={"include_usage": True})
    )
    assert "".join(c.text for chunk in chunks for c in chunk.choices) == expected.text
    assert chunks[-2].choices[0].finish_reason == expected.finish_reason
    assert chunks[-1].usage == answer.usage.model_copy(
        update={"prompt_tokens_details": chunks[-1].usage.prompt_tokens_details}
    )


def test_sampled_text_is_that_of_the_engine(client: openai.OpenAI, engine: Engine) -> None:
    params = {"max_tokens": 24, "temperature": 0.8, "top_p": 0.9, "presence_penalty": 0.5}
    prompt = [5, 300, 7, 411]
    answer = client.completions.create(model="tiny", prompt=prompt, seed=11, n=3, **params)
    expected = [whole(engine, prompt, seed=11 + copy, **params).text for copy in range(3)]
    assert [choice.text for choice in answer.choices] == expected
    assert len(set(expected)) > 1


def test_prompts_of_one_request(client: openai.OpenAI, engine: Engine) -> None:
    expected = [whole(engine, p, max_tokens=9, temperature=0.0).text for p in PROMPTS]
    options = {"model": "tiny", "prompt": PROMPTS, "n": 2, "max_tokens": 9, "temperature": 0}
    answer = client.completions.create(**options)
    assert [c.text for c in answer.choices] == [text for text in expected for _ in range(2)]
    assert [c.index for c in answer.choices] == list(range(6))

    texts = [""] * 6
    for chunk in client.completions.create(**options, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [c.text for c in answer.choices]


def test_echo(client: openai.OpenAI, engine: Engine) -> None:
    expected = whole(engine, PROMPTS[0], max_tokens=5, temperature=0.0).text
    options = {"model": "tiny", "prompt": PROMPTS[0], "max_tokens": 5, "temperature": 0}
    answer = client.completions.create(**options, echo=True)
    assert answer.choices[0].text == PROMPTS[0] + expected
    chunks = client.completions.create(**options, echo=True, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == PROMPTS[0] + expected


def test_logprobs(client: openai.OpenAI, engine: Engine) -> None:
    expected = whole(engine, PROMPTS[1], max_tokens=6, temperature=0.0, logprobs=2)
    options = {"model": "tiny", "prompt": PROMPTS[1], "max_tokens": 6, "temperature": 0}
    found = client.completions.create(**options, logprobs=2).choices[0].logprobs
    assert "".join(found.tokens) == expected.text
    assert found.token_logprobs == pytest.approx([e.logprob for e in expected.logprobs])
    assert [len(top) for top in found.top_logprobs] == [2] * 6
    offsets = [len("".join(found.tokens[:n])) for n in range(6)]
    assert found.text_offset == offsets
    streamed = [
        chunk.choices[0].logprobs
        for chunk in client.completions.create(**options, logprobs=2, stream=True)
    ]
    assert [t for each in streamed for t in each.tokens] == found.tokens
    assert [t for each in streamed for t in each.text_offset] == offsets


def test_reused_prompt_tokens_are_reported(server: Server) -> None:
    prompt = [(7 * n) % 1000 + 10 for n in range(300)]
    first = server.post("/v1/completions", prompt=prompt, max_tokens=1).json()
    again = server.post("/v1/completions", prompt=prompt, max_tokens=1).json()
    cached = [a["usage"]["prompt_tokens_details"]["cached_tokens"] for a in (first, again)]
    assert cached[0] == 0
    assert cached[1] >= 128
    assert server.metric("dsa:prefix_cache_hits_total") >= cached[1]


def test_events_of_a_stream(server: Server) -> None:
    answer = server.post("/v1/completions", prompt="import os", max_tokens=4, stream=True)
    assert answer.headers["content-type"].startswith("text/event-stream")
    found = events(answer.body)
    assert found[-1] == "[DONE]"
    assert {each["object"] for each in found[:-1]} == {"text_completion"}
    assert len({each["id"] for each in found[:-1]}) == 1
    assert found[-2]["choices"][0]["finish_reason"] == "length"


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
