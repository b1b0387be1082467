"""Answers in token ids: on request, and always where a model has no tokenizer."""

import json
from pathlib import Path

import openai
import pytest

import dsa_compile
from dsa_compile.runtime import Engine, SamplingParams
from dsa_compile.runtime.requests.generation_config import GenerationConfig
from dsa_compile.server.artifact_text import ArtifactText
from examples.small_models.geometries import tiny_config
from examples.small_models.models import save_hf, tiny_model
from tests.server.serving import events, serving
from tests.server.test_chat_answers import Chat

PROMPT = "def main(argv=None):"
ASKED = {"model": "tiny", "max_tokens": 12, "temperature": 0}
IDS = {"return_token_ids": True}


def test_completions_hold_token_ids(client: openai.OpenAI, engine: Engine) -> None:
    params = SamplingParams(max_tokens=12, temperature=0.0)
    expected = engine.generate([PROMPT], params)[0]
    options = {**ASKED, "prompt": PROMPT}
    (choice,) = client.completions.create(**options, extra_body=IDS).choices
    assert choice.text == expected.text
    assert choice.token_ids == list(expected.token_ids)
    assert choice.prompt_token_ids == list(expected.prompt_token_ids)
    chunks = [
        c.choices[0] for c in client.completions.create(**options, extra_body=IDS, stream=True)
    ]
    assert [token for chunk in chunks for token in chunk.token_ids] == list(expected.token_ids)
    assert chunks[0].prompt_token_ids == list(expected.prompt_token_ids)
    assert not any(hasattr(chunk, "prompt_token_ids") for chunk in chunks[1:])
    (plain,) = client.completions.create(**options).choices
    assert not hasattr(plain, "token_ids")


def test_chats_hold_token_ids(client: openai.OpenAI) -> None:
    options = {**ASKED, "messages": [{"role": "user", "content": "import os"}], "logprobs": True}
    answer = client.chat.completions.create(**options, extra_body=IDS)
    ids = answer.choices[0].token_ids
    assert len(ids) == answer.usage.completion_tokens
    assert len(answer.prompt_token_ids) == answer.usage.prompt_tokens
    first, *chunks = client.chat.completions.create(**options, extra_body=IDS, stream=True)
    assert first.prompt_token_ids == answer.prompt_token_ids
    streamed = [token for c in chunks for token in getattr(c.choices[0], "token_ids", None) or []]
    assert streamed == ids
    plain = client.chat.completions.create(**options)
    assert not hasattr(plain, "prompt_token_ids")
    assert not hasattr(plain.choices[0], "token_ids")


@pytest.mark.slow
def test_a_model_without_a_tokenizer_streams_token_ids(tmp_path: Path) -> None:
    model, artifact = tmp_path / "model", tmp_path / "artifact"
    save_hf(tiny_model(tiny_config(2, first_k_dense_replace=1)), model)
    dsa_compile.compile(str(model), str(artifact), recipe="fp32", records=False)
    prompt = [5, 9, 2]
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    expected = Engine.load(artifact).generate([prompt], params)[0]
    body = {"prompt": prompt, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    with serving(artifact) as server:
        (choice,) = server.post("/v1/completions", **body).json()["choices"]
        assert (choice["text"], choice["token_ids"]) == ("", list(expected.token_ids))
        *chunks, done = events(server.post("/v1/completions", **body, stream=True).body)
    assert done == "[DONE]"
    pieces = [chunk["choices"][0]["token_ids"] for chunk in chunks]
    assert [token for piece in pieces for token in piece] == list(expected.token_ids)


def test_token_ids_are_streamed_step_by_step() -> None:
    """The engine is scripted: how many steps a real one makes before it is read depends on load."""
    chat = Chat("import os, sys")
    chat.service.text = ArtifactText("", None, None, GenerationConfig())
    whole = json.loads(chat.post("/v1/completions", prompt=[5, 9]))["choices"][0]["token_ids"]
    *chunks, done = events(chat.post("/v1/completions", prompt=[5, 9], stream=True))
    assert done == "[DONE]"
    pieces = [chunk["choices"][0]["token_ids"] for chunk in chunks]
    assert [token for piece in pieces for token in piece] == whole
    assert len(pieces) > 1
