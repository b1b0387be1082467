"""Generations of both families: what each parses to, however the text is cut into pieces.

A line of ``corpus/*.jsonl``::

    {"family": "deepseek_v32" or "glm", "name": ..., "kind": ..., "thinking": true, false or null,
     "tools": [...] (those of the catalog if missing), "text": ...,
     "expect": {"reasoning": ..., "content": ..., "tool_calls": [
         {"name": ..., "complete": true, "arguments": {...}} or
         {"name": ..., "complete": false, "text": ...}]}}
"""

import json
from itertools import pairwise
from pathlib import Path

import pytest

from dsa_compile.chat import Answer, ContentDelta, Finished, ReasoningDelta, collect
from tests.chat.catalog import TOOLS, new_parser

CORPUS = [
    json.loads(line)
    for file in sorted((Path(__file__).parent / "corpus").glob("*.jsonl"))
    for line in file.read_text(encoding="utf-8").split("\n")
    if line
]


def parser_of(record):
    return new_parser(record["family"], record["thinking"], record.get("tools", TOOLS))


def is_cut(record) -> bool:
    return record["kind"] == "truncated"


def whole_of(record) -> Answer:
    return parser_of(record).parse(record["text"], is_cut(record))


def streamed(record, pieces) -> Answer:
    parser = parser_of(record)
    events = [event for piece in pieces for event in parser.feed(piece)]
    return collect([*events, *parser.finish(is_cut(record))])


def every(record):
    return f"{record['family']}: {record['name']}"


@pytest.mark.parametrize("record", CORPUS, ids=every)
def test_parses_to_what_the_corpus_says(record) -> None:
    answer = whole_of(record)
    expect = record["expect"]
    assert (answer.reasoning, answer.content) == (expect["reasoning"], expect["content"])
    assert len(answer.tool_calls) == len(expect["tool_calls"])
    for call, wanted in zip(answer.tool_calls, expect["tool_calls"], strict=True):
        assert (call.name, call.complete) == (wanted["name"], wanted["complete"])
        if call.complete:
            assert json.loads(call.arguments) == wanted["arguments"]
        else:
            assert call.arguments == wanted["text"]
            with pytest.raises(ValueError, match=r"."):
                json.loads(call.arguments)  # nobody carries out half a call


@pytest.mark.parametrize("record", CORPUS, ids=every)
def test_every_split_point_gives_the_same(record) -> None:
    text = record["text"]
    whole = whole_of(record)
    for at in range(len(text) + 1):
        assert streamed(record, [text[:at], text[at:]]) == whole, repr(text[:at])


@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize("record", CORPUS, ids=every)
def test_pieces_of_one_size_give_the_same(record, size) -> None:
    text = record["text"]
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    assert streamed(record, pieces) == whole_of(record)


@pytest.mark.parametrize("record", CORPUS, ids=every)
def test_a_prefix_is_never_taken_back(record) -> None:
    """Output after any prefix begins the output of the whole text, however the text goes on."""
    text = record["text"]
    whole = whole_of(record)
    parser, events = parser_of(record), []
    for char in text:
        events += parser.feed(char)
        now = collect(events)
        assert whole.reasoning.startswith(now.reasoning)
        assert whole.content.startswith(now.content)
        for call, final in zip(now.tool_calls, whole.tool_calls, strict=False):
            assert (call.id, call.name) == (final.id, final.name)
            assert final.arguments.startswith(call.arguments)


@pytest.mark.parametrize("record", CORPUS, ids=every)
def test_calls_of_well_formed_answers_leave_no_tag_behind(record) -> None:
    if record["kind"] not in ("well-formed", "nested JSON", "typing"):
        return
    answer = whole_of(record)
    for text in (answer.content, answer.reasoning):
        assert "DSML" not in text
        assert "tool_call" not in text


@pytest.mark.parametrize("record", CORPUS, ids=every)
def test_ends_with_one_finished_event(record) -> None:
    parser = parser_of(record)
    assert not any(isinstance(event, Finished) for event in parser.feed(record["text"]))
    last = parser.finish(is_cut(record))[-1]
    called = any(call["complete"] for call in record["expect"]["tool_calls"])
    assert last == Finished(called)


@pytest.mark.parametrize("record", CORPUS, ids=every)
def test_neighbouring_pieces_are_joined(record) -> None:
    events = parser_of(record).feed(record["text"])
    for kind in (ReasoningDelta, ContentDelta):
        for before, after in pairwise(events):
            assert not (isinstance(before, kind) and isinstance(after, kind))


def test_the_corpus_covers_both_families() -> None:
    kinds = {"well-formed", "nested JSON", "unicode", "look-alike", "malformed", "truncated"}
    for family in ("deepseek_v32", "glm"):
        found = [record["kind"] for record in CORPUS if record["family"] == family]
        assert len(found) >= 30
        assert kinds <= set(found)
