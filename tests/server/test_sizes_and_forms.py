"""Bodies and heads that are large, or of another form than their field's."""

import socket

import openai
import pytest
from pydantic import ValidationError
from tokenizers import Tokenizer

from dsa_compile.runtime.requests.logprobs import TokenLogprobs
from dsa_compile.server.openai_types import ChatRequest, CompletionRequest, ResponsesRequest
from dsa_compile.server.prompt_encoding import encoder
from dsa_compile.server.token_text import CompletionLogprobs
from tests.server.serving import PATIENCE, Server, serving
from tests.trained import trained_model

COMPLETIONS = "/v1/completions"
MANY = 20_000


@pytest.mark.parametrize(
    ("body", "change"),
    [
        (CompletionRequest, {"prompt": ["a"] * MANY + [5]}),
        (CompletionRequest, {"prompt": [5] * MANY + ["a"]}),
        (CompletionRequest, {"prompt": [[5]] * MANY + [["a"]]}),
        (CompletionRequest, {"prompt": [[True]] * MANY}),
        (CompletionRequest, {"prompt": {"a": 1}}),
        (CompletionRequest, {"stop": [5] * MANY}),
        (CompletionRequest, {"stop_token_ids": ["a"] * MANY}),
        (CompletionRequest, {"logit_bias": {str(n): "x" for n in range(MANY)}}),
        (CompletionRequest, {"guided_choice": [5] * MANY}),
        (ChatRequest, {"messages": [5] * MANY}),
        (ChatRequest, {"messages": [], "tools": ["a"] * MANY}),
        (ResponsesRequest, {"input": [5] * MANY}),
    ],
)
def test_a_list_is_refused_by_its_first_wrong_element(body, change) -> None:
    """An error for each of millions would hold up all other requests."""
    with pytest.raises(ValidationError) as raised:
        body(**({"prompt": "x"} if body is CompletionRequest else {}) | change)
    assert raised.value.error_count() <= 2


@pytest.mark.parametrize("prompt", ["", "x", [], [1, 2], ["a", ""], [[1], []]])
def test_prompts_in_every_form(prompt) -> None:
    assert CompletionRequest(prompt=prompt).prompt == prompt


def test_null_is_a_field_left_out() -> None:
    nulls = dict.fromkeys(("echo", "priority", "ignore_eos", "audio", "temperature", "logprobs"))
    assert CompletionRequest(prompt="x", **nulls) == CompletionRequest(prompt="x")
    assert CompletionRequest(prompt="x", max_tokens=None).max_tokens is None
    options = ChatRequest(messages=[], stream_options={"include_usage": None}).stream_options
    assert options is not None
    assert not options.include_usage
    with pytest.raises(ValidationError, match="required"):
        CompletionRequest(prompt=None)


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"prompt": 5}, "prompt", "give a text"),
        ({"prompt": ["a", 5]}, "prompt", "give a text"),
        ({"stop": 5}, "stop", "give a text or a list"),
        ({"stop": "\ud83d"}, "stop", "surrogate"),
        ({"prompt": "\ud83d"}, "prompt", "surrogate"),
        ({"top_k": 1 << 64}, "top_k", "in [-1, 2147483647]"),
        ({"guided_json": 5}, "guided_json", "valid"),
        ({"logit_bias": {"1": "x"}}, "logit_bias", "numbers by token id"),
    ],
)
def test_an_error_names_its_field_alone(server: Server, change, param, words) -> None:
    answer = server.post(COMPLETIONS, **{"prompt": "x", "max_tokens": 1} | change)
    error = answer.json()["error"]
    assert (answer.status, error["param"]) == (400, param), error
    assert words in error["message"]


def test_what_does_not_fit_is_told_in_the_words_that_clients_look_for(
    server: Server, client: openai.OpenAI
) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        client.completions.create(model="tiny", prompt=[5] * 3000, max_tokens=1)
    assert raised.value.code == "context_length_exceeded"
    assert raised.value.param == "prompt"
    assert "maximum context length is 2048 tokens: a prompt of 3000" in raised.value.message
    chat = [{"role": "user", "content": "a b " * 3000}]
    with pytest.raises(openai.BadRequestError) as raised:
        client.chat.completions.create(model="tiny", messages=chat, max_tokens=1)
    assert raised.value.param == "messages"
    answer = server.post(COMPLETIONS, prompt="x", max_tokens=1 << 40)
    assert answer.json()["error"]["param"] == "max_tokens"


def test_a_body_that_is_not_said_to_be_json(server: Server) -> None:
    for kind, status in (("text/plain", 415), ("application/json", 400)):
        answer = server.request("POST", COMPLETIONS, b'["x"]', **{"content-type": kind})
        assert answer.status == status
    assert server.request("POST", COMPLETIONS, b"").status == 400


def test_a_head_without_end(server: Server) -> None:
    with socket.create_connection(server.address, PATIENCE) as endless:
        endless.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n")
        with pytest.raises(OSError, match=r"reset|Broken"):
            _send_for_ever(endless)
    assert server.get("/health", **{"x-a": "a" * 60_000}).status == 200


def _send_for_ever(connection: socket.socket) -> None:
    for _ in range(10_000):
        connection.sendall(b"x-a: " + b"a" * 65_536 + b"\r\n")


@pytest.mark.slow
def test_a_head_that_takes_too_long(artifact) -> None:
    with serving(artifact, "--request-read-timeout", "0.3") as server:
        for start in (b"", b"GET /hea", b"GET /health HTTP/1.1\r\nhost: x\r\n"):
            with socket.create_connection(server.address, PATIENCE) as half:
                half.sendall(start)
                assert half.recv(100) == b"", "the server ends it"
        with socket.create_connection(server.address, PATIENCE) as kept:
            for _ in range(2):
                kept.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
                answer = b""
                while not answer.endswith(b"}"):
                    answer += kept.recv(4096)
                assert answer.startswith(b"HTTP/1.1 200")
            kept.settimeout(0.6)
            with pytest.raises(TimeoutError):  # between requests it may wait
                kept.recv(1)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(trained_model() / "tokenizer.json"))


def test_a_text_has_the_same_ids_while_other_threads_run(tokenizer: Tokenizer) -> None:
    for text in ("def main(argv=None):\n" * 300, "café 日本語 👩‍👩‍👧 " * 50, ""):
        for special in (True, False):
            want = tokenizer.encode(text, add_special_tokens=special).ids
            assert encoder(tokenizer, special).encode(text).ids == want


def test_parts_of_characters_have_names_of_their_own_and_places_in_the_text(tokenizer) -> None:
    text = "né 日本 👩‍👧!"
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    others = tokenizer.encode("語é", add_special_tokens=False).ids
    entries = [
        TokenLogprobs(token, -2.0, 2, ((others[n % len(others)], -1.0), (token, -2.0)))
        for n, token in enumerate(ids)
    ]
    found = CompletionLogprobs(tokenizer, 2).add(entries)
    for token, name, top in zip(ids, found["tokens"], found["top_logprobs"], strict=True):
        same = tokenizer.decode([token]) == name
        assert same or name.startswith("bytes:\\x")
        assert top[name] == -2.0 or token in others
    assert found["text_offset"][0] == 0
    assert found["text_offset"] == sorted(found["text_offset"])
    assert all(at < len(text) for at in found["text_offset"])
    prompt = CompletionLogprobs(tokenizer, 0).of_prompt(ids, entries[1:], True)
    assert prompt["text_offset"] == found["text_offset"]
