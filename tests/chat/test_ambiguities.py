"""Ambiguities of formats, decided alike for both families; docs/chat.md has the table."""

import json

import pytest

from dsa_compile.errors import ChatError
from tests.chat.catalog import tool
from tests.chat.forms import DEEPSEEK, GLM_5

ASK = {"role": "user", "content": "Hi"}
TOOLS = [tool("a"), tool("b")]
RESULT = {"deepseek": "<result>{}</result>", "glm": "<tool_response>{}</tool_response>"}
NAME = {"deepseek": 'invoke name="{}"', "glm": "<tool_call>{}"}


@pytest.fixture(params=["deepseek", "glm"])
def family(request) -> str:
    return request.param


def encode(family: str, *messages: dict, **options) -> str:
    form = DEEPSEEK if family == "deepseek" else GLM_5
    return form.encode(list(messages), tools=TOOLS, **options)


def calling(*names: str, arguments="{}", **fields) -> dict:
    calls = [{"id": n, "function": {"name": n, "arguments": arguments}} for n in names]
    return {"role": "assistant", "content": None, "tool_calls": calls, **fields}


def result(name: str | None, content) -> dict:
    made = {"role": "tool", "content": content}
    return made if name is None else {**made, "tool_call_id": name}


def results_in(family: str, prompt: str) -> list[str]:
    before, after = RESULT[family].split("{}")
    found = prompt.rpartition(NAME[family].format("b"))[2]
    return [part.partition(after)[0] for part in found.split(before)[1:]]


def test_results_are_written_in_the_order_of_the_calls(family) -> None:
    prompt = encode(family, ASK, calling("a", "b"), result("b", "B"), result("a", "A"))
    assert results_in(family, prompt) == ["A", "B"]


def test_an_unknown_id_is_refused(family) -> None:
    with pytest.raises(ChatError) as caught:
        encode(family, ASK, calling("a", "b"), result("c", "C"))
    assert caught.value.param == "messages[2].tool_call_id"


@pytest.mark.parametrize("by_id", [True, False])
def test_fewer_results_than_calls_open_the_answer(family, by_id) -> None:
    given = result("a" if by_id else None, "A")
    prompt = encode(family, ASK, calling("a", "b"), given, thinking=True)
    assert results_in(family, prompt) == ["A"]
    assert prompt.endswith("<think>")
    if family == "deepseek":
        assert prompt.endswith("\n</function_results>\n\n<think>")


def test_null_content_is_empty(family) -> None:
    for before, null in (
        ([], {"role": "system", "content": None}),
        ([ASK], calling("a", "b")),
        ([ASK, calling("a", "b")], result("a", None)),
    ):
        empty = {**null, "content": ""}
        after = [] if null["role"] == "tool" else [ASK]
        shown = encode(family, *before, null, *after)
        assert shown == encode(family, *before, empty, *after)
        assert "None" not in shown
        missing = {name: value for name, value in null.items() if name != "content"}
        assert shown == encode(family, *before, missing, *after)


@pytest.mark.parametrize("role", ["user", "developer"])
def test_a_question_has_text(family, role) -> None:
    with pytest.raises(ChatError) as caught:
        encode(family, {"role": role, "content": None})
    assert caught.value.param == "messages[0].content"


@pytest.mark.parametrize("arguments", ["", " \n", None])
def test_empty_arguments_are_none(family, arguments) -> None:
    given = encode(family, ASK, calling("a", arguments=arguments), ASK)
    assert given == encode(family, ASK, calling("a", arguments="{}"), ASK)


def test_a_developer_message_before_the_last_question_stays(family) -> None:
    messages = [{"role": "developer", "content": "Be kind."}, ASK]
    for thinking in (True, False):
        prompt = encode(family, *messages, thinking=thinking)
        assert 0 < prompt.index("Be kind.") < prompt.index("Hi")
    answer = {"role": "assistant", "content": "Hello."}
    assert "Be kind." in encode(family, *messages, answer, ASK, thinking=True)


def test_a_conversation_encoded_again_is_the_same(family) -> None:
    """With what the parser made of each answer in it."""
    form = DEEPSEEK if family == "deepseek" else GLM_5
    answers = [
        calling("a", "b", arguments=json.dumps({"x": 'é <b> "'}), reasoning_content="Hm."),
        {"role": "assistant", "content": "It is\n\ncold.", "reasoning_content": "So."},
    ]
    messages, again = [ASK], [ASK]
    for answer in answers:
        prompt = form.encode(messages, tools=TOOLS, thinking=True)
        assert prompt == form.encode(again, tools=TOOLS, thinking=True)
        whole = form.encode(
            [*messages, answer], tools=TOOLS, thinking=True, add_generation_prompt=False
        )
        written = whole.removeprefix(prompt).removesuffix("<｜end▁of▁sentence｜>")
        parsed = form.parser(prompt, TOOLS).parse(written)
        messages += [answer, *(result(n, n) for n in "ba" if "tool_calls" in answer)]
        ids = [call.id for call in parsed.tool_calls]
        again += [parsed.message(), *(result(i, n) for i, n in zip(ids[::-1], "ba", strict=False))]
    last = {"add_generation_prompt": False, "tools": TOOLS, "thinking": True}
    assert form.encode(messages, **last) == form.encode(again, **last)


def test_a_key_does_not_reach_into_the_next_call() -> None:
    """Tags in reasoning, of which a later call would end the last."""
    prompt = GLM_5.encode([ASK], tools=TOOLS, thinking=True)
    call = "<tool_call>a<arg_key>x</arg_key><arg_value>1</arg_value></tool_call>"
    for said in ("<tool_call>0<arg_key>", "<tool_call>a<arg_key>x<tool_call>"):
        answer = GLM_5.parser(prompt, TOOLS).parse(f"{said}</think>{call}")
        assert answer.reasoning == said
        assert [made.name for made in answer.tool_calls] == ["a"]


@pytest.mark.parametrize("length", [128, 129, 500])
def test_every_call_of_an_answer_can_be_sent_back(family, length) -> None:
    form = DEEPSEEK if family == "deepseek" else GLM_5
    prompt = form.encode([ASK], tools=TOOLS)
    before = form.encode([ASK, calling("a", arguments='{"x": "y"}')], add_generation_prompt=False)
    written = before.partition("</think>")[2].replace('"a"', f'"{"n" * length}"')
    written = written.replace("<tool_call>a", "<tool_call>" + "n" * length)
    answer = form.parser(prompt, TOOLS).parse(written)
    assert len(answer.tool_calls) == (length == 128)
    form.encode([ASK, answer.message(), ASK])
