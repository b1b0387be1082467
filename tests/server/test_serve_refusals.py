"""Refusals: with which status and whose fault, in OpenAI's shape."""

import threading

import pytest

from tests.server.conftest import KEY
from tests.server.serving import Answer, Server, serving

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
MESSAGES = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "look"}}


def error_of(answer: Answer) -> dict:
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "\n" not in error["message"]
    return error


@pytest.mark.parametrize(
    ("body", "status", "param", "words"),
    [
        ({}, 400, "prompt", "required"),
        ({"prompt": []}, 400, "prompt", "empty"),
        ({"prompt": [[]]}, 400, "prompt", "empty"),
        ({"prompt": [1, -1]}, 400, "prompt", "out of range"),
        ({"prompt": [1, 1 << 70]}, 400, "prompt", "out of range"),
        ({"prompt": "a", "max_tokens": -1}, 400, "max_tokens", ">= 1"),
        ({"prompt": "a", "max_tokens": 10**9}, 400, "max_tokens", "max_model_len"),
        ({"prompt": "a", "max_tokens": "5"}, 400, "max_tokens", "integer"),
        ({"prompt": "a", "temperature": -1}, 400, "temperature", "temperature"),
        ({"prompt": "a", "min_p": 2}, 400, "min_p", "min_p"),
        ({"prompt": "a", "n": 0}, 400, "n", "greater"),
        ({"prompt": "a", "n": 10**6}, 400, "n", "at most"),
        ({"prompt": "a", "logprobs": 1000}, 400, "logprobs", "[0, 20]"),
        ({"prompt": "a", "logprobs": 1000, "echo": True}, 400, "logprobs", "[0, 20]"),
        ({"prompt": "a", "suffix": "b"}, 400, "suffix", "not supported"),
        ({"prompt": "a", "best_of": 3}, 400, "best_of", "not supported"),
        ({"prompt": "a", "logit_bias": {"x": 1}}, 400, "logit_bias", "not a token id"),
        ({"prompt": "a", "logit_bias": {"9" * 9: 1}}, 400, "logit_bias", "below 1536"),
        ({"prompt": "a", "stop_token_ids": [5000]}, 400, "stop_token_ids", "below 1536"),
        ({"prompt": "a", "stop": ["", "b"]}, 400, "stop", "stop"),
        ({"prompt": "a", "guided_grammar": ""}, 400, "guided_grammar", "not a known field"),
        ({"prompt": "a", "stream_options": {}}, 400, "stream_options", "stream=true"),
        ({"prompt": "a", "model": "gpt"}, 404, "model", "does not exist"),
        ({"prompt": "\ud800"}, 400, "prompt", ""),
    ],
)
def test_completions(server: Server, body, status, param, words) -> None:
    answer = server.request("POST", COMPLETIONS, body)
    error = error_of(answer)
    assert answer.status == status, error
    assert error["param"] == param or (param == "prompt" and error["param"].startswith("prompt"))
    assert words in error["message"]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": TOOL}, "tool_choice"),
        ({"tool_choice": "maybe"}, "tool_choice"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        ({"store": True}, "store"),
        ({"audio": {}}, "audio"),
        ({"n": 10**12}, "n"),
    ],
)
def test_chats(server: Server, change, param) -> None:
    answer = server.request("POST", CHAT, {"messages": MESSAGES, **change})
    error = error_of(answer)
    assert (answer.status, error["param"]) == (400, param), error


HALF = "\ud800"
CALL = {"id": "a", "function": {"name": "look", "arguments": {HALF: 1}}}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (RESPONSES, {"input": [{"role": "messages[99]", "content": "x"}]}),
        (RESPONSES, {"input": [{"role": "user", "content": "x", "type": "messages[99]"}]}),
        (RESPONSES, {"input": "x", "text": {HALF: 1}}),
        (RESPONSES, {"input": "x", "reasoning": {HALF: 1}}),
        (COMPLETIONS, {"prompt": "a", HALF: 1}),
        (COMPLETIONS, {"prompt": "a", "logit_bias": {HALF: 1}}),
        (COMPLETIONS, {"prompt": "a", "structured_outputs": {HALF: 1}}),
        (COMPLETIONS, {"prompt": "a", "stream_options": {HALF: 1}}),
        (COMPLETIONS, {"prompt": "a", "guided_json": {"properties": {HALF: {}}}}),
        (CHAT, {"messages": MESSAGES, "response_format": {"type": HALF}}),
        (CHAT, {"messages": MESSAGES, "tool_choice": {HALF: 1}}),
        (CHAT, {"messages": [{"role": HALF, "content": "x"}]}),
        (CHAT, {"messages": [*MESSAGES, {"role": "assistant", "tool_calls": [CALL]}]}),
        (CHAT, {"messages": MESSAGES, "tools": [{**TOOL, "type": HALF}]}),
        (CHAT, {"messages": MESSAGES, "tools": [{**TOOL, "function": {"name": HALF}}]}),
    ],
)
def test_names_that_mean_something_else_or_no_text(server: Server, path, body) -> None:
    """Where errors repeat them, as where they are read."""
    answer = server.request("POST", path, body)
    assert answer.status == 400, answer
    error_of(answer)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"text"',
        b"\xff\xfe{}",
        b'{"prompt": "\xc3\x28"}',
        b"[" * 100_000,
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": 1e999}',
        b'{"prompt": "a", "seed": ' + b"9" * 4000 + b"}",
    ],
    ids=range(10),
)
def test_bodies_that_are_no_request(server: Server, body: bytes) -> None:
    answer = server.request("POST", COMPLETIONS, body, **{"content-type": "application/json"})
    assert answer.status == 400, answer
    error_of(answer)


def test_unknown_paths_and_methods(server: Server) -> None:
    for method, path, status in (("GET", "/nope", 404), ("GET", COMPLETIONS, 405)):
        answer = server.request(method, path)
        assert answer.status == status
        error_of(answer)


def test_a_body_of_ten_megabytes(server: Server) -> None:
    body = b'{"prompt": "' + b"a" * 10_000_000 + b'"}'
    try:
        answer = server.request("POST", COMPLETIONS, body, **{"content-type": "application/json"})
    except ConnectionError:  # it need not be read to its end
        pass
    else:
        assert answer.status == 413
        assert error_of(answer)["code"] == "body_too_large"
    assert server.get("/ready").status == 200


@pytest.mark.slow
def test_keys_queue_and_origins(artifact) -> None:
    flags = ["--api-key", "other", KEY, "--max-num-seqs", "1", "--max-queued-requests", "1"]
    origins = ["--allowed-origins", "https://a.example"]
    with serving(artifact, *flags, *origins, "--served-model-name", "one", "two") as server:
        for key in ("", "Bearer", "Bearer wrong", f"Basic {KEY}", f"Bearer {KEY}x", "Bearer \xe9"):
            answer = server.get("/v1/models", authorization=key)
            assert answer.status == 401, key
            assert answer.headers["www-authenticate"] == "Bearer"
            error_of(answer)
        good = {"authorization": f"Bearer {KEY}"}
        models = server.get("/v1/models", **good).json()["data"]
        assert [model["id"] for model in models] == ["one", "two"]
        assert server.get("/health").status == 200

        body = {"prompt": "a", "max_tokens": 5, "model": "two"}
        answer = server.request("POST", COMPLETIONS, {**body, "n": 3}, **good)
        assert answer.json()["model"] == "one"  # alone, more than fit may wait
        long = {"prompt": "import", "max_tokens": 1500, "ignore_eos": True, "n": 2}
        running = threading.Thread(
            target=server.request, args=("POST", COMPLETIONS, long), kwargs=good
        )
        running.start()
        while not server.metric("dsa:num_requests_running", **good):
            assert running.is_alive()
        answer = server.request("POST", COMPLETIONS, body, **good)
        assert answer.status == 429
        assert int(answer.headers["retry-after"]) >= 1
        assert error_of(answer)["type"] == "rate_limit_error"
        running.join()

        allowed = server.get("/health", origin="https://a.example").headers
        assert allowed["access-control-allow-origin"] == "https://a.example"
        other = server.get("/health", origin="https://b.example").headers
        assert "access-control-allow-origin" not in other
        assert not any(KEY in line for line in server.log)


def test_no_origin_is_allowed_by_default(server: Server) -> None:
    headers = server.get("/health", origin="https://a.example").headers
    assert "access-control-allow-origin" not in headers
