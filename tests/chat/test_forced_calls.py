"""Calls that an answer must make: what the grammar admits is parsed as the calls it shall hold."""

import json
from typing import Any

import pytest

from dsa_compile.chat.template import ChatTemplate
from dsa_compile.chat.template_format import TemplateFormat
from dsa_compile.errors import ChatError
from tests.chat.catalog import tool
from tests.chat.forms import DEEPSEEK, GLM_5
from tests.chat.walks import Walker

FORMS = {"deepseek": DEEPSEEK, "glm": GLM_5}
PROMPTS = {True: "<think>", False: "</think>", None: "<｜Assistant｜>"}
LOOK = tool(
    "look",
    {
        "kind": {"enum": ["near", "far", 3]},
        "size": {"enum": ["s", "m"]},
        "days": {"type": "integer", "minimum": 0, "maximum": 40},
        "deep": {
            "type": "object",
            "properties": {"on": {"type": "boolean"}, "note": {"type": "string"}},
            "required": ["on"],
            "additionalProperties": False,
        },
    },
    required=["kind", "size"],
)
WAIT = tool("wait", {"reason": {"type": "string", "minLength": 1, "maxLength": 5}})
ANY = tool("any")
FREE = {"type": "function", "function": {"name": "free", "parameters": {"type": "object"}}}
TOOLS = [LOOK, WAIT, ANY, FREE]


@pytest.fixture(scope="module")
def walker() -> Walker:
    return Walker()


def fits(name: str, arguments: dict[str, Any]) -> bool:
    match name:
        case "look":
            days, deep = arguments.get("days", 0), arguments.get("deep", {"on": True})
            return (
                arguments["kind"] in ("near", "far", 3)
                and arguments["size"] in ("s", "m")
                and type(days) is int
                and 0 <= days <= 40
                and type(deep["on"]) is bool
                and isinstance(deep.get("note", ""), str)
                and set(deep) <= {"on", "note"}
                and set(arguments) <= {"kind", "size", "days", "deep"}
            )
        case "wait":
            return not arguments or (1 <= len(arguments.pop("reason")) <= 5 and not arguments)
        case "any":
            return not arguments
        case "free":
            return len(arguments) <= 1
    return False


@pytest.mark.parametrize("thinking", [True, False, None])
@pytest.mark.parametrize("only", [None, "look", "any"])
@pytest.mark.parametrize("family", FORMS)
def test_what_is_admitted_is_a_call(walker: Walker, family, only, thinking) -> None:
    form, prompt = FORMS[family], PROMPTS[thinking]
    tag = form.forced_calls(prompt, TOOLS, only=only, many=only is None)
    ended, names = 0, set()
    for seed in range(30):
        text = walker.text(tag, seed)
        if text is None:
            continue
        ended += 1
        answer = form.parser(prompt, TOOLS).parse(text)
        assert answer.content == "", text
        assert bool(answer.tool_calls), text
        for call in answer.tool_calls:
            assert call.complete, text
            assert fits(call.name, json.loads(call.arguments)), text
            names.add(call.name)
        if only is not None:
            (call,) = answer.tool_calls
        assert "</think>" in text or not thinking
    assert ended >= 20
    assert names == ({only} if only else {"look", "wait", "any", "free"})


@pytest.mark.parametrize("family", FORMS)
def test_what_the_model_writes_is_admitted(walker: Walker, family) -> None:
    form = FORMS[family]
    made = [
        {"name": "look", "arguments": json.dumps({"kind": "far", "size": "m", "days": 3})},
        {"name": "wait", "arguments": '{"reason": "a < b"}'},
        {"name": "any", "arguments": "{}"},
    ]
    message = {
        "role": "assistant",
        "content": "",
        "reasoning_content": "Hm <b>.",
        "tool_calls": [
            {"type": "function", "id": f"{i}", "function": f} for i, f in enumerate(made)
        ],
    }
    ask = [{"role": "user", "content": "Hi"}]
    prompt = form.encode(ask, tools=TOOLS, thinking=True)
    whole = form.encode([*ask, message], tools=TOOLS, thinking=True, add_generation_prompt=False)
    written = whole.removeprefix(prompt).removesuffix("<｜end▁of▁sentence｜>")
    tag = form.forced_calls(prompt, TOOLS)
    assert walker.admits(tag, written)
    assert not walker.admits(form.forced_calls(prompt, TOOLS, many=False), written)
    assert not walker.admits(form.forced_calls(prompt, TOOLS, only="wait"), written)
    assert not walker.admits(tag, "Hm.</think>Hello")


@pytest.mark.parametrize("family", FORMS)
def test_a_call_within_reasoning_is_not_admitted(walker: Walker, family) -> None:
    form = FORMS[family]
    calls = walker.text(form.forced_calls("</think>", TOOLS, only="any"), 0)
    tag = form.forced_calls("<think>", TOOLS, only="any")
    assert walker.admits(tag, f"Hm.</think>{calls}")
    assert not walker.admits(tag, f"Hm.{calls}</think>{calls}")


def test_the_end_of_a_value_does_not_stand_in_one(walker: Walker) -> None:
    tag = DEEPSEEK.forced_calls("</think>", TOOLS, only="look")
    before = '\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="look">\n'
    values = {"kind": "far", "size": "m"}
    for name, value in values.items():
        before += f'<｜DSML｜parameter name="{name}" string="true">{value}</｜DSML｜parameter>\n'
    after = "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>"
    for note, admitted in (("fine", True), ("</｜DSML｜parameter>", False)):
        deep = f'<｜DSML｜parameter name="deep" string="false">{{"on": true, "note": "{note}"}}'
        assert walker.admits(tag, before + deep + after) == admitted


def test_a_choice_loses_the_blanks_around_it() -> None:
    text = "<tool_call>look<arg_key>kind</arg_key><arg_value> {} </arg_value></tool_call>"
    for written, value in (("far", "far"), ("3", 3), ("other", " other ")):
        (call,) = GLM_5.parser("</think>", TOOLS).parse(text.format(written)).tool_calls
        assert json.loads(call.arguments) == {"kind": value}


@pytest.mark.parametrize(
    ("tools", "only", "words"),
    [([], None, "no tools"), (TOOLS, "nope", "known: look"), ([LOOK], "wait", "no tool has")],
)
def test_refusals(tools, only, words) -> None:
    with pytest.raises(ChatError, match=words) as caught:
        DEEPSEEK.forced_calls("", tools, only=only)
    assert caught.value.param == "tool_choice"


def test_a_template_without_a_known_syntax() -> None:
    form = TemplateFormat(ChatTemplate("{{ messages }}{{ tools }}", "test"))
    assert form.forced_calls("", TOOLS) is None
