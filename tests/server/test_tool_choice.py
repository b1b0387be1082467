"""Calls that a request requires, of a model that would not make them, by the real client."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.server.chat_models import TAGS, chat_artifact
from tests.server.serving import PATIENCE, Server, serving

MESSAGES = [{"role": "user", "content": "What is the weather in Oslo?"}]


def function(name: str, properties: dict[str, Any] | None = None, **schema: Any) -> dict[str, Any]:
    described: dict[str, Any] = {"name": name}
    if properties is not None:
        described["parameters"] = {"type": "object", "properties": properties, **schema}
    return {"type": "function", "function": described}


TOOLS = [
    function(
        "weather",
        {
            "city": {"type": "string", "maxLength": 12},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
            "units": {"enum": ["metric", "imperial"]},
        },
        required=["city", "days"],
    ),
    function("now"),
]
NAMED = {"type": "function", "function": {"name": "weather"}}


FAMILIES = [pytest.param(name, marks=pytest.mark.slow if name == "glm" else ()) for name in TAGS]


@pytest.fixture(scope="module", params=FAMILIES)
def chatting(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp(request.param)
    with serving(chat_artifact(request.param, folder)) as found:
        yield found


@pytest.fixture
def chats(chatting: Server) -> Any:
    url = chatting.url + "/v1"
    return openai.OpenAI(base_url=url, api_key="any", timeout=PATIENCE).chat.completions


def check(name: str, text: str) -> None:
    arguments = json.loads(text)
    if name == "now":
        assert arguments == {}
        return
    assert len(arguments["city"]) <= 12
    assert type(arguments["days"]) is int
    assert 1 <= arguments["days"] <= 9
    assert arguments.get("units") in (None, "metric", "imperial")
    assert set(arguments) <= {"city", "days", "units"}


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0, 1])
def test_a_named_function_is_called(chats: Any, temperature: int) -> None:
    options = {"model": None, "messages": MESSAGES, "tools": TOOLS, "tool_choice": NAMED}
    options |= {"temperature": temperature, "seed": 3, "max_tokens": 400, "n": 2}
    options["extra_body"] = {"chat_template_kwargs": {"enable_thinking": False}}
    answer = chats.create(**options)
    for choice in answer.choices:
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content is None
        (call,) = choice.message.tool_calls
        assert call.function.name == "weather"
        check("weather", call.function.arguments)
    texts = ["", ""]
    for chunk in chats.create(**options, stream=True):
        for choice in chunk.choices:
            for call in choice.delta.tool_calls or ():
                texts[choice.index] += call.function.arguments
    assert texts == [c.message.tool_calls[0].function.arguments for c in answer.choices]


@pytest.mark.slow
@pytest.mark.parametrize("many", [True, False])
def test_a_call_is_required(chats: Any, many: bool) -> None:
    names = set()
    for seed in range(4):
        (choice,) = chats.create(
            model=None, messages=MESSAGES, tools=TOOLS, tool_choice="required", seed=seed,
            parallel_tool_calls=many, max_tokens=600, temperature=1,
            extra_body={"chat_template_kwargs": {"enable_thinking": False}},
        ).choices  # fmt: skip
        calls = choice.message.tool_calls
        if choice.finish_reason == "length":  # it went on calling
            assert many
            calls = calls[:-1]
        for call in calls:
            check(call.function.name, call.function.arguments)
            names.add(call.function.name)
        assert many or len(calls) == 1
    assert names <= {"weather", "now"}


@pytest.mark.slow
def test_reasoning_comes_first(chats: Any) -> None:
    """Reasoning is free; a bias ends it early."""
    end = 6  # </think>
    options = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": NAMED, "temperature": 1}
    thinking = {"chat_template_kwargs": {"thinking": True}}
    ended = 0
    for seed in range(4):
        (choice,) = chats.create(
            model=None, **options, max_tokens=500, seed=seed, logit_bias={end: 12},
            extra_body=thinking,
        ).choices  # fmt: skip
        if choice.finish_reason == "length":
            continue
        ended += 1
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content is None
        (call,) = choice.message.tool_calls
        check(call.function.name, call.function.arguments)
    assert ended


def test_a_call_that_is_cut_off(chats: Any) -> None:
    (choice,) = chats.create(
        model=None, messages=MESSAGES, tools=TOOLS, tool_choice=NAMED, max_tokens=30, temperature=0,
        extra_body={"chat_template_kwargs": {"enable_thinking": False}},
    ).choices  # fmt: skip
    assert choice.finish_reason == "length"
    for call in choice.message.tool_calls or ():
        with pytest.raises(json.JSONDecodeError):
            json.loads(call.function.arguments)


def test_none_calls_nothing_and_shows_no_tools(chats: Any, chatting: Server) -> None:
    options = {"messages": MESSAGES, "max_tokens": 8, "temperature": 0, "model": None}
    plain = chats.create(**options)
    answer = chats.create(**options, tools=TOOLS, tool_choice="none")
    assert answer.usage.prompt_tokens == plain.usage.prompt_tokens
    assert answer.choices[0].message.content == plain.choices[0].message.content


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"tool_choice": "required"}, "tool_choice", "no tools"),
        ({"tool_choice": NAMED, "tools": TOOLS[1:]}, "tool_choice", "known: now"),
        ({"tool_choice": {"type": "function"}, "tools": TOOLS}, "tool_choice", "its name"),
        (
            {"tool_choice": NAMED, "tools": TOOLS, "response_format": {"type": "json_object"}},
            "response_format",
            "or a tool_choice",
        ),
        (
            {
                "tool_choice": "required",
                "tools": [function("f", {"x": {"type": "objct"}})],
            },
            "tool_choice",
            "Unsupported type",
        ),
        ({"tool_choice": NAMED, "tools": TOOLS, "ignore_eos": True}, "grammar", "ignore_eos"),
    ],
)
def test_refusals(chatting: Server, change, param, words) -> None:
    answer = chatting.request("POST", "/v1/chat/completions", {"messages": MESSAGES, **change})
    error = answer.json()["error"]
    assert (answer.status, error["param"]) == (400, param), error
    assert words in error["message"]
