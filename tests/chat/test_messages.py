"""Requests that cannot be encoded: each error names the field at fault, for both formats."""

import json

import pytest

from dsa_compile.errors import ChatError, UserError
from tests.chat.catalog import tool
from tests.chat.forms import DEEPSEEK, GLM_5

ASK = {"role": "user", "content": "Hi"}
CALLS = [{"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
CALLING = {"role": "assistant", "content": None, "tool_calls": CALLS}


def with_arguments(arguments):
    function = {"name": "f", "arguments": arguments}
    return [ASK, {"role": "assistant", "tool_calls": [{"id": "a", "function": function}]}]


BAD = [
    ([], "messages", "empty"),
    ("Hi", "messages", "a list"),
    (["Hi"], "messages[0]", "an object"),
    ([{"content": "Hi"}], "messages[0].role", "one of system"),
    ([ASK, {"role": "function", "content": "x"}], "messages[1].role", "found 'function'"),
    ([{"role": "user"}], "messages[0].content", "needs text"),
    ([{"role": "developer", "content": None}], "messages[0].content", "needs text"),
    ([{"role": "user", "content": 3}], "messages[0].content", "found int"),
    ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0].type", "text"),
    ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text", "null"),
    ([{"role": "user", "content": "a\ud800"}], "messages[0].content", "surrogate"),
    ([ASK, {"role": "assistant", "reasoning_content": 1}], "messages[1].reasoning_content", "int"),
    ([ASK, {"role": "assistant", "tool_calls": "f"}], "messages[1].tool_calls", "a list"),
    ([ASK, {"role": "assistant", "tool_calls": [{}]}], "messages[1].tool_calls[0].function", "a"),
    (
        [ASK, {"role": "assistant", "tool_calls": [{"function": {"name": 'a"b'}}]}],
        "messages[1].tool_calls[0].function.name",
        "name",
    ),
    (with_arguments([1]), "messages[1].tool_calls[0].function.arguments", "a JSON object"),
    (with_arguments("\ud800"), "messages[1].tool_calls[0].function.arguments", "surrog"),
    ([ASK, CALLING | {"tool_calls": CALLS * 2}], "messages[1].tool_calls[1].id", "another call's"),
    ([{"role": "tool", "content": "x"}], "messages[0]", "must follow"),
    ([ASK, {"role": "tool", "content": "x"}], "messages[1]", "must follow"),
    ([ASK, CALLING, *[{"role": "tool", "content": "x"}] * 2], "messages[3]", "a result too many"),
    (
        [ASK, CALLING, {"role": "tool", "content": "x", "tool_call_id": "b"}],
        "messages[2].tool_call_id",
        "no call before it has the id 'b'; known: 'a'",
    ),
    (
        [ASK, CALLING, *[{"role": "tool", "content": "x", "tool_call_id": "a"}] * 2],
        "messages[3].tool_call_id",
        "has a result already",
    ),
    (
        [
            ASK, CALLING, {"role": "tool", "content": "x", "tool_call_id": "a"},
            {"role": "tool", "content": "y"},
        ],
        "messages[3].tool_call_id",
        "is missing",
    ),
]  # fmt: skip


@pytest.mark.parametrize("form", [DEEPSEEK, GLM_5], ids=["deepseek_v32", "glm"])
@pytest.mark.parametrize(
    ("messages", "param", "problem"), BAD, ids=[b[1] + " " + b[2] for b in BAD]
)
def test_bad_messages(form, messages, param, problem) -> None:
    with pytest.raises(ChatError) as refused:
        form.encode(messages, add_generation_prompt=False)
    assert refused.value.param == param
    assert problem in str(refused.value)
    assert "\n" not in str(refused.value)


CUT = [
    ('{"city": "Os', {"city": "Os"}),
    ('{"city": "Oslo", "da', {"city": "Oslo"}),
    ('{"city": "Oslo", "days":', {"city": "Oslo"}),
    ('{"city": "Oslo", "dry": tr', {"city": "Oslo"}),
    ('{"a": {"b": [1, {"c": "d"}, ', {"a": {"b": [1, {"c": "d"}]}}),
    ('{"a": ["b\\u12', {"a": ["b"]}),
    ('{"a": "b\\\\', {"a": "b\\"}),
    ("{", {}),
]
NO_OBJECT = [
    "[1", "text", "{'a': 1}", '{"a": "x"y"}', '{"a": 1, "b": }', '{"a": 1}}', '{"a": 1} more',
    '{"a": NaN}', '{"a": 1e999}', '{"a": "\\ud800"}', '{"a": ' + "[" * 100_000,
]  # fmt: skip


@pytest.mark.parametrize("form", [DEEPSEEK, GLM_5], ids=["deepseek_v32", "glm"])
@pytest.mark.parametrize(
    ("arguments", "read"),
    [
        *CUT,
        *((text, {"arguments": text}) for text in NO_OBJECT),
        *((empty, {}) for empty in ("null", "[]", [])),
    ],
    ids=lambda value: str(value)[:20],
)
def test_malformed_arguments_end_no_conversation(form, arguments, read) -> None:
    """What a model wrote comes back with every later turn."""
    given = [*with_arguments(arguments), {"role": "tool", "content": "no", "tool_call_id": "a"}]
    plain = [*with_arguments(read), given[-1]]
    assert form.encode(given) == form.encode(plain)


@pytest.mark.parametrize("form", [DEEPSEEK, GLM_5], ids=["deepseek_v32", "glm"])
@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ({}, "tools"),
        ([tool("a"), None], "tools[1]"),
        ([{"type": "web_search"}], "tools[0].type"),
        ([{"type": "function"}], "tools[0].function"),
        ([tool("")], "tools[0].function.name"),
        ([tool("a b")], "tools[0].function.name"),
        ([tool('a"')], "tools[0].function.name"),
        ([{"function": {"name": "f", "parameters": []}}], "tools[0].function.parameters"),
        ([tool("f", {"a": {"default": float("nan")}})], "tools[0].function"),
        ([tool("f", {"a\udfff": {}})], "tools[0].function"),
    ],
)
def test_bad_tools(form, tools, param) -> None:
    for function in (lambda: form.encode([ASK], tools=tools), lambda: form.parser("", tools)):
        with pytest.raises(ChatError) as refused:
            function()
        assert refused.value.param == param


@pytest.mark.parametrize(
    ("response_format", "param"),
    [
        ({}, "response_format.type"),
        ({"type": "xml"}, "response_format.type"),
        ({"type": "json_schema"}, "response_format.json_schema.schema"),
    ],
)
def test_bad_response_format(response_format, param) -> None:
    with pytest.raises(ChatError) as refused:
        DEEPSEEK.encode([ASK], response_format=response_format)
    assert refused.value.param == param


def test_a_chat_error_is_the_users() -> None:
    assert issubclass(ChatError, UserError)


@pytest.mark.parametrize("form", [DEEPSEEK, GLM_5], ids=["deepseek_v32", "glm"])
def test_what_is_given_is_left_as_it_was(form) -> None:
    messages = [ASK, CALLING, {"role": "tool", "content": "x", "tool_call_id": "a"}]
    before = json.dumps(messages)
    form.encode(messages, tools=[tool("f")])
    assert json.dumps(messages) == before
