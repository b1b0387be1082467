"""Structured answers over a real server: schemas, patterns and choices, and what is refused."""

import json
import re

import openai
import pytest

from tests.server.serving import Server, events

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
SCHEMA = {
    "type": "object",
    "properties": {"count": {"type": "integer"}, "kind": {"enum": ["x", "y"]}},
    "required": ["count", "kind"],
    "additionalProperties": False,
}


def fits(text: str) -> bool:
    value = json.loads(text)
    return set(value) == {"count", "kind"} and type(value["count"]) is int and value["kind"] in "xy"


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0, 1])
def test_a_schema_through_the_client(client: openai.OpenAI, temperature: int) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA, "strict": True}}
    options = {"model": "tiny", "messages": MESSAGES, "temperature": temperature, "seed": 1}
    options |= {"response_format": form, "max_tokens": 300}
    (choice,) = client.chat.completions.create(**options).choices
    assert choice.finish_reason == "stop"
    assert fits(choice.message.content)
    parts = client.chat.completions.create(**options, stream=True)
    text = "".join(c.delta.content or "" for part in parts for c in part.choices)
    assert text == choice.message.content


@pytest.mark.parametrize(
    ("field", "matches"),
    [
        ({"structured_outputs": {"regex": "[a-c]{3}-[0-9]{2}"}}, "[a-c]{3}-[0-9]{2}"),
        ({"guided_regex": "(ab)+c"}, "(ab)+c"),
        ({"structured_outputs": {"choice": ["yes", "no é"]}}, "yes|no é"),
        ({"guided_choice": ["one"]}, "one"),
        ({"guided_json": {"type": "boolean"}}, "true|false"),
        ({"structured_outputs": {"json": '{"const": 5}'}}, "5"),
        ({"structured_outputs": {"json_object": True}}, r"(?s)\{.*\}"),
        ({"response_format": {"type": "json_object"}}, r"(?s)\{.*\}"),
    ],
)
def test_completions(server: Server, field: dict, matches: str) -> None:
    body = {"prompt": "import os", "max_tokens": 400, "temperature": 0, "n": 2, **field}
    for choice in server.post(COMPLETIONS, **body).json()["choices"]:
        text = choice["text"]
        if choice["finish_reason"] == "length" and "json_object" in str(field):
            continue  # an object may be as long as the model likes
        assert choice["finish_reason"] == "stop"
        assert re.fullmatch(matches, text)


def test_beside_others_and_with_other_options(server: Server) -> None:
    body = {"prompt": ["import os", "x = "], "temperature": 0, "max_tokens": 12}
    plain = server.post(COMPLETIONS, **body).json()["choices"]
    options = {"logprobs": 1, "frequency_penalty": 1, "logit_bias": {"5": 3}, "stream": True}
    answer = server.post(COMPLETIONS, **body, **options, guided_regex="[0-9]{30}")
    *chunks, _ = events(answer.body)
    text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
    assert text.isdigit()
    assert server.post(COMPLETIONS, **body).json()["choices"] == plain
    server.wait_for_idle()


@pytest.mark.parametrize(
    ("field", "param", "words"),
    [
        ({"guided_regex": "(a"}, "guided_regex", "not closed"),
        ({"guided_regex": "a" * 5000}, "guided_regex", "at most 4096"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice", "give one of"),
        ({"guided_choice": []}, "guided_choice", "1 to 1024"),
        ({"guided_json": {"type": "objct"}}, "guided_json", "Unsupported type"),
        ({"guided_json": "{"}, "guided_json", "not JSON"),
        ({"structured_outputs": {"regex": 3}}, "structured_outputs.regex", "string"),
        ({"structured_outputs": {"grammar": "x"}}, "structured_outputs.grammar", "use one of"),
        ({"response_format": {"type": "xml"}}, "response_format", "types are"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "schema"),
        ({"guided_regex": "a", "ignore_eos": True}, "grammar", "ignore_eos"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_refusals(server: Server, field: dict, param: str, words: str, stream: bool) -> None:
    answer = server.post(COMPLETIONS, prompt="a", stream=stream, **field)
    assert answer.status == 400
    error = answer.json()["error"]
    assert error["param"] == param
    assert words in error["message"]


def test_a_schema_too_deep(server: Server) -> None:
    schema: dict = {"type": "integer"}
    for _ in range(40):
        schema = {"type": "array", "items": schema, "x": [[]]}
    deep = {"type": "json_schema", "json_schema": {"schema": schema}}
    assert server.post(CHAT, messages=MESSAGES, response_format=deep, max_tokens=2).status == 200
    for _ in range(40):
        schema = {"items": schema}
    deep = {"type": "json_schema", "json_schema": {"schema": schema}}
    answer = server.post(CHAT, messages=MESSAGES, response_format=deep)
    assert answer.status == 400
    error = answer.json()["error"]
    assert error["param"] == "response_format.json_schema.schema"
    assert "64 levels" in error["message"]
