"""What a request may cost before it is known whether it can be served."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from pydantic import ValidationError

from dsa_compile.server.errors import ApiError
from dsa_compile.server.openai_types import CompletionRequest
from dsa_compile.server.prompt_encoding import LEAST_BOUND, require_text_fits
from dsa_compile.server.service import Service
from tests.server.serving import Server

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
LONG = "é漢字 " * (8 * 10**5)


class CountingTokenizer:
    """A token for each character; knows how many it has encoded."""

    def __init__(self) -> None:
        self.encoded = 0

    def encode_batch_fast(self, texts: list[str], add_special_tokens: bool) -> list[list[int]]:
        self.encoded += sum(map(len, texts))
        return [[0] * len(text) for text in texts]


def test_a_text_far_too_long_is_not_encoded_whole() -> None:
    tokenizer = CountingTokenizer()
    with pytest.raises(ApiError) as found:
        require_text_fits(tokenizer, "a" * 10**7, 100_000, "prompt")
    assert (found.value.status, found.value.code) == (400, "context_length_exceeded")
    assert tokenizer.encoded < 3 * 10**5
    require_text_fits(tokenizer, "a" * 10**5, 10**5, "prompt")


def highest_memory(server: Server) -> int:
    """Bytes."""
    lines = Path(f"/proc/{server.process.pid}/status").read_text().splitlines()
    (kilobytes,) = (line.split()[1] for line in lines if line.startswith("VmHWM:"))
    return int(kilobytes) << 10


def test_long_texts_take_little_memory(server: Server) -> None:
    before = highest_memory(server)
    for path, field, value in (
        (COMPLETIONS, "prompt", LONG),
        (CHAT, "messages", [{"role": "user", "content": LONG}]),
        (RESPONSES, "input", LONG),
        ("/tokenize", "prompt", LONG),
    ):
        body = json.dumps({field: value}, ensure_ascii=False).encode()
        kind = {"content-type": "application/json"}
        answer = server.request("POST", path, body, **kind)
        assert answer.status == 400, path
        error = answer.json()["error"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", field)
    assert highest_memory(server) - before < 300 << 20


@pytest.mark.parametrize(("path", "field"), [(COMPLETIONS, "prompt"), ("/detokenize", "tokens")])
def test_more_token_ids_than_any_prompt_has(server: Server, path, field) -> None:
    answer = server.request("POST", path, {field: [1] * (LEAST_BOUND + 1)})
    assert (answer.status, answer.json()["error"]["param"]) == (400, field)


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": "a", "metadata": {"a": [' + b"[]," * 600_000 + b"[]]}}",
        b'{"prompt": [' + b'"",' * 600_000 + b'""]}',
        b'{"prompt": "' + b'\\"' * 10 + b'", "metadata": {"a": [' + b"{}," * 600_000 + b"{}]}}",
    ],
    ids=["lists", "texts", "objects"],
)
def test_bodies_of_very_many_values(server: Server, body: bytes) -> None:
    answer = server.request("POST", COMPLETIONS, body, **{"content-type": "application/json"})
    assert answer.status == 413


def test_brackets_within_a_text_are_none(server: Server) -> None:
    body = json.dumps({"prompt": '["a"], ' * 200_000}).encode()
    answer = server.request("POST", COMPLETIONS, body, **{"content-type": "application/json"})
    assert answer.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32"])
def test_bodies_that_are_not_utf_8(server: Server, encoding: str) -> None:
    body = '{"prompt": "a", "max_tokens": 1}'.encode(encoding)
    answer = server.request("POST", COMPLETIONS, body, **{"content-type": "application/json"})
    assert answer.status == 400


def test_one_unknown_field_is_enough() -> None:
    with pytest.raises(ValidationError) as found:
        CompletionRequest.model_validate({"prompt": "a", **{f"x{i}": 1 for i in range(1000)}})
    assert [error["loc"] for error in found.value.errors()] == [("x0",)]


@pytest.mark.parametrize("field", ["logit_bias", "stop_token_ids"])
def test_lists_of_tokens_are_counted_for_every_answer(field: str) -> None:
    """Each answer has its own, in both processes."""
    own = SimpleNamespace(
        settings=SimpleNamespace(max_choices=128), engine=SimpleNamespace(vocab_size=10**5)
    )
    tokens = range(50_000)
    listed = dict.fromkeys(map(str, tokens), 1) if field == "logit_bias" else list(tokens)
    body = CompletionRequest.model_validate({"prompt": "a", field: listed})
    Service.check_count(own, body, 5)
    with pytest.raises(ApiError, match="at most 43690"):
        Service.check_count(own, body, 6)


def test_scores_of_prompts_are_counted_for_every_answer(server: Server) -> None:
    body = {"prompt": [[1] * 1600] * 2, "prompt_logprobs": 20, "max_tokens": 1}
    answer = server.request("POST", COMPLETIONS, {**body, "n": 64})
    assert (answer.status, answer.json()["error"]["param"]) == (400, "prompt_logprobs")
