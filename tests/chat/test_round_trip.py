"""Answers encoded, parsed and encoded again: nothing changes, however the text was cut."""

import json
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from dsa_compile.chat import collect
from tests.chat.catalog import tool
from tests.chat.forms import DEEPSEEK, GLM_5

ASK = [{"role": "user", "content": "Hi"}]
TAGS = (
    "<think>", "</think>", "<", "</", "<｜DSML｜", "<｜DSML｜function_calls>", "<tool_call>", "\n",
    "\n\n", '"', "\\", "<arg_key>", "</arg_valu", "</｜DSML｜param", "</｜DSML｜invoke>", "｜",
)  # fmt: skip
END_OF_VALUE = ("</｜DSML｜parameter>", "</arg_value>")

text = st.text(st.characters(codec="utf-8"), max_size=20)
pieces = st.lists(text | st.sampled_from(TAGS), max_size=8).map("".join)
# a format escapes nothing: what ends a value cannot stand in one
value_text = pieces.filter(lambda s: not any(end in s for end in END_OF_VALUE))
name = st.from_regex(r"[a-zA-Z_][a-zA-Z0-9_.-]{0,20}", fullmatch=True)
scalars = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
)
values = st.recursive(
    scalars | value_text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=8,
).filter(lambda v: not any(end in json.dumps(v, ensure_ascii=False) for end in END_OF_VALUE))
TYPES = {
    type(None): "null", bool: "boolean", int: "integer", float: "number", str: "string",
    list: "array", dict: "object",
}  # fmt: skip


@st.composite
def answers(draw, trimmed):
    """An assistant message, and tools whose schemas fit its calls."""
    calls, tools = [], {}
    for number in range(draw(st.integers(0, 3))):
        # one function a call: two calls may disagree on the type of a parameter
        function = f"{draw(name)}{number}"
        arguments = draw(st.dictionaries(name, values, max_size=3))
        schema = {key: {"type": TYPES[type(value)]} for key, value in arguments.items()}
        tools[function] = tool(function, schema)
        made = {"name": function, "arguments": json.dumps(arguments)}
        calls.append({"id": f"call_{number}", "type": "function", "function": made})
    words = pieces.map(str.strip) if trimmed else pieces
    # reasoning ends at the first </think>, and the next tag may complete what text ends in
    message = {
        "role": "assistant",
        "content": draw(words.filter(lambda s: not s.endswith(("<", ">")))),
        "reasoning_content": draw(words.filter(lambda s: "</think>" not in s)),
        "tool_calls": calls,
    }
    return message, [*tools.values(), tool("always")]


def generated(form, message, tools, end):
    """Prompt, and the text that the model wrote behind it if this is its answer."""
    prompt = form.encode(ASK, tools=tools, thinking=True)
    whole = form.encode([*ASK, message], tools=tools, thinking=True, add_generation_prompt=False)
    assert whole.startswith(prompt)
    return prompt, whole[len(prompt) :].removesuffix(end)


def check(form, message, tools, cuts, end):
    prompt, written = generated(form, message, tools, end)
    parser = form.parser(prompt, tools)
    edges = [0, *sorted(cut % (len(written) + 1) for cut in cuts), len(written)]
    parts = [written[a:b] for a, b in pairwise(edges)]
    events = [event for part in parts for event in parser.feed(part)]
    answer = collect([*events, *parser.finish()])
    assert answer.reasoning == message["reasoning_content"]
    assert answer.content == message["content"]
    for call, made in zip(answer.tool_calls, message["tool_calls"], strict=True):
        assert (call.name, call.complete) == (made["function"]["name"], True)
        assert json.loads(call.arguments) == json.loads(made["function"]["arguments"])
    assert generated(form, answer.message(), tools, end) == (prompt, written)


cuts = st.lists(st.integers(0, 10_000), max_size=6)


@settings(max_examples=100, deadline=None)
@given(answers(trimmed=False), cuts)
def test_deepseek(answer, cuts) -> None:
    message, tools = answer
    # a repeated <think> is dropped where reasoning begins
    if message["reasoning_content"].lstrip().startswith("<think>"):
        message["reasoning_content"] = ""
    check(DEEPSEEK, message, tools, cuts, "<｜end▁of▁sentence｜>")


@settings(max_examples=100, deadline=None)
@given(answers(trimmed=True), cuts)
def test_glm(answer, cuts) -> None:
    message, tools = answer
    if message["reasoning_content"].startswith("<think>") or not message["reasoning_content"]:
        message["reasoning_content"] = "Hm."  # the template writes no <think> for none
    check(GLM_5, message, tools, cuts, "")


@settings(max_examples=300, deadline=None)
@given(st.lists(pieces, max_size=6), st.sampled_from([True, False, None]))
def test_any_text_parses_the_same_in_any_pieces(parts, thinking) -> None:
    for form, end in ((DEEPSEEK, "x"), (GLM_5, "x")):
        tools = [tool("a", {"a": {"type": "string"}})]
        prompt = {True: "<think>", False: "</think>", None: end}[thinking]
        parser = form.parser(prompt, tools)
        events = [event for part in parts for event in parser.feed(part)]
        answer = collect([*events, *parser.finish()])
        assert answer == form.parser(prompt, tools).parse("".join(parts))
