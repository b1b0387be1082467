"""Streaming: text comes out as early as it is certain, and calls while they arrive."""

import json

import pytest

from dsa_compile.chat import (
    ContentDelta,
    Finished,
    ReasoningDelta,
    StreamParser,
    ToolCallBegin,
    ToolCallDelta,
    ToolCallEnd,
    collect,
)
from dsa_compile.chat.arguments import Arguments
from dsa_compile.chat.glm import GLM
from dsa_compile.chat.grammar import Argument
from dsa_compile.chat.tools import parse_tools
from tests.chat.catalog import TOOLS, new_parser

FAMILIES = ["deepseek_v32", "glm"]


def fed(parser, *pieces):
    """Events of each piece."""
    return [parser.feed(piece) for piece in pieces]


@pytest.mark.parametrize("family", FAMILIES)
def test_text_comes_out_at_once(family) -> None:
    parser = new_parser(family, True)
    assert fed(parser, "Think", " hard.", "</think>", "So", " it is") == [
        [ReasoningDelta("Think")],
        [ReasoningDelta(" hard.")],
        [],
        [ContentDelta("So")],
        [ContentDelta(" it is")],
    ]
    assert parser.finish() == [Finished(False)]


@pytest.mark.parametrize("family", FAMILIES)
def test_only_what_may_be_a_tag_is_held_back(family) -> None:
    parser = new_parser(family)
    assert fed(parser, "a <", "b", " \n", "c <t", "d") == [
        [ContentDelta("a ")],
        [ContentDelta("<b")],
        [ContentDelta(" ")],
        [ContentDelta("\nc " if family == "glm" else "\nc <t")],
        [ContentDelta("<td" if family == "glm" else "d")],
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_without_tools_only_reasoning_ends_are_looked_for(family) -> None:
    parser = new_parser(family, False, tools=[])
    assert fed(parser, "\n", "<tool_call", "<｜DSML") == [
        [] if family == "glm" else [ContentDelta("\n")],
        [ContentDelta("<tool_call")],
        [ContentDelta("<｜DSML")],
    ]


def test_deepseek_call_event_by_event() -> None:
    parser = new_parser("deepseek_v32")
    pieces = [
        "Now.", "\n\n<｜DSML｜", 'function_calls>\n<｜DSML｜invoke name="get_', 'weather">\n',
        '<｜DSML｜parameter name="city" string="true">', "O", "slo", "</｜DSML｜para", "meter>\n",
        '<｜DSML｜parameter name="days" string="false">1', "2</｜DSML｜parameter>",
        "\n</｜DSML｜invoke>", "\n</｜DSML｜function_calls>",
    ]  # fmt: skip
    assert fed(parser, *pieces) == [
        [ContentDelta("Now.")], [], [], [],
        [ToolCallBegin(0, "call_0", "get_weather"), ToolCallDelta(0, '{"city": "')],
        [ToolCallDelta(0, "O")], [ToolCallDelta(0, "slo")], [], [ToolCallDelta(0, '"')],
        [ToolCallDelta(0, ', "days": ')], [ToolCallDelta(0, "12")],
        [ToolCallDelta(0, "}"), ToolCallEnd(0, True)],
        [],
    ]  # fmt: skip
    assert parser.finish() == [Finished(True)]


def test_glm_call_event_by_event() -> None:
    parser = new_parser("glm")
    pieces = [
        "Now.\n", "<tool_call>get_", "weather", "<arg_key>city</arg_key><arg_value>", "O", 'sl"',
        "o</arg", "_value><arg_key>", "days</arg_key>", "<arg_value>1", "2</arg_value></tool",
        "_call>", "\n<tool_call>ping", "</tool_call>",
    ]  # fmt: skip
    assert fed(parser, *pieces) == [
        [ContentDelta("Now.")], [], [],
        [ToolCallBegin(0, "call_0", "get_weather"), ToolCallDelta(0, '{"city": "')],
        [ToolCallDelta(0, "O")], [ToolCallDelta(0, 'sl\\"')], [ToolCallDelta(0, "o")],
        [ToolCallDelta(0, '"')], [], [ToolCallDelta(0, ', "days": ')], [ToolCallDelta(0, "12")],
        [ToolCallDelta(0, "}"), ToolCallEnd(0, True)],
        [],
        [ToolCallBegin(1, "call_1", "ping"), ToolCallDelta(1, "{}"), ToolCallEnd(1, True)],
    ]  # fmt: skip
    assert parser.finish() == [Finished(True)]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_long_string_streams_whole(family) -> None:
    start = {
        "deepseek_v32": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="write_file">\n'
        '<｜DSML｜parameter name="content" string="true">',
        "glm": "<tool_call>write_file<arg_key>content</arg_key><arg_value>",
    }
    parser = new_parser(family)
    parser.feed(start[family])
    for _ in range(100):
        assert parser.feed("some words ") == [ToolCallDelta(0, "some words ")]
    assert parser.finish() == [ToolCallEnd(0, False), Finished(False)]


def test_a_string_that_might_have_been_a_scalar_streams_once_it_is_too_long() -> None:
    parser = new_parser("glm")
    parser.feed("<tool_call>search<arg_key>query</arg_key><arg_value>")
    assert parser.feed("x" * 32) == []
    assert parser.feed("y") == [ToolCallDelta(0, '"' + "x" * 32 + "y")]
    assert parser.feed("z") == [ToolCallDelta(0, "z")]


def test_ids_are_unlike() -> None:
    text = "<tool_call>ping</tool_call>" * 2
    calls = StreamParser(False, parse_tools(TOOLS), GLM).parse(text).tool_calls
    assert len({call.id for call in calls}) == 2
    assert all(call.id.startswith("call_") for call in calls)


@pytest.mark.parametrize("family", FAMILIES)
def test_names_and_keys_without_end_are_text(family) -> None:
    start = {
        "deepseek_v32": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="',
        "glm": "<tool_call>",
    }
    parser = new_parser(family)
    assert parser.feed(start[family] + "x" * 1000) == []
    [event] = parser.feed("x" * 100)
    assert event == ContentDelta(start[family] + "x" * 1100)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("thinking", [True, False, None])
def test_a_model_caught_in_blanks_is_not_held_back(family, thinking) -> None:
    """No more than 64 of them, wherever they stand, in one piece and one by one."""
    call = {
        "deepseek_v32": '<｜DSML｜function_calls><｜DSML｜invoke name="ping"></｜DSML｜invoke>'
        "</｜DSML｜function_calls>",
        "glm": "<tool_call>ping</tool_call>",
    }
    for start in ("", "a", call[family]):
        for blanks in (" " * 300, "\n" * 300, " \n" * 150):
            for end in ("", "b", call[family], "</think>", "<think>"):
                whole = new_parser(family, thinking).parse(start + blanks + end)
                parser = new_parser(family, thinking)
                events = parser.feed(start)
                for blank in blanks:
                    events += parser.feed(blank)
                spoken = sum(len(e.text) for e in events if hasattr(e, "text"))
                swallowed = 300 if not start and family == "glm" and blanks[0] == "\n" else 0
                assert spoken >= 300 - 64 - 8 - swallowed
                assert collect([*events, *parser.feed(end), *parser.finish()]) == whole


class Piece(str):
    """Text that counts the characters which are copied when it is added to other text."""

    copied = 0

    def __add__(self, other: str) -> "Piece":
        Piece.copied += len(self) + len(other)
        return Piece(str(self) + str(other))

    def __radd__(self, other: str) -> "Piece":
        return Piece(other) + self


@pytest.mark.parametrize("kind", ["array", "object", "number", "string", None])
def test_the_work_of_a_value_that_is_held_back_grows_with_its_length(kind) -> None:
    parameters = {"properties": {"a": {"type": kind} if kind else {}}}
    [tool] = parse_tools([{"function": {"name": "f", "parameters": parameters}}])
    Piece.copied = 0
    arguments = Arguments(tool)
    text = arguments.begin(Argument("a", None))
    for number in range(1000):
        text += str(arguments.push(Piece(f"{',' if number else '['}{number}")))
    text += arguments.push("]") + arguments.end() + arguments.close()
    assert Piece.copied < 100_000  # characters; of nearly 4000, in 1000 pieces
    value = json.loads(text)["a"]
    assert value == (
        str(list(range(1000))).replace(" ", "") if kind == "string" else [*range(1000)]
    )
