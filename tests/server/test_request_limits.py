"""Deadlines of requests, and prefixes that they share."""

import pytest

from tests.server.serving import Server, events

PATH = "/v1/completions"
LONG = {"prompt": "import os", "max_tokens": 1900, "ignore_eos": True, "temperature": 0}


def test_a_deadline_ends_an_answer_and_frees_its_blocks(server: Server) -> None:
    answer = server.post(PATH, **LONG, timeout=0.05)
    assert answer.status == 408
    assert answer.json()["error"]["code"] == "request_timeout"
    *_, last, done = events(server.post(PATH, **LONG, timeout=0.05, stream=True).body)
    assert done == "[DONE]"
    assert last["error"]["param"] == "timeout"
    server.wait_for_idle()
    assert server.post(PATH, prompt="a", max_tokens=2, timeout=1e6).status == 200


def test_prefixes_are_shared_among_equal_salts_alone(server: Server) -> None:
    prompt = list(range(100, 300))

    def cached(salt: str | None) -> int:
        answer = server.post(PATH, prompt=prompt, max_tokens=1, cache_salt=salt)
        return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert cached("one") == 0
    assert cached("two") == 0
    assert cached(None) == 0
    assert cached("one") > 0


@pytest.mark.parametrize(
    ("field", "param"),
    [
        ({"timeout": 0}, "timeout"),
        ({"timeout": 1e9}, "timeout"),
        ({"cache_salt": "x" * 513}, "cache_salt"),
        ({"cache_salt": 3}, "cache_salt"),
    ],
)
def test_refusals(server: Server, field: dict, param: str) -> None:
    answer = server.post(PATH, prompt="a", **field)
    assert answer.status == 400
    assert answer.json()["error"]["param"] == param
