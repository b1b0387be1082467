"""Requests of a serving benchmark: random ones, and those of files."""

import json
import random
from pathlib import Path

import pytest

from dsa_compile.errors import UserError
from dsa_compile.measure.serve.workload import (
    RandomTokens,
    Sample,
    chosen,
    read_custom,
    read_sharegpt,
)


def tokens(seed: int = 0, prefix_len: int = 0) -> RandomTokens:
    return RandomTokens(random.Random(seed), 1000, prefix_len)


def test_random_lengths_and_prefix() -> None:
    found = tokens(prefix_len=4).samples(300, 100, 20, 0.5)
    assert found == tokens(prefix_len=4).samples(300, 100, 20, 0.5)
    assert found != tokens(1, prefix_len=4).samples(300, 100, 20, 0.5)
    lengths = [len(sample.prompt) - 4 for sample in found]
    assert (min(lengths), max(lengths)) == (50, 150)
    assert {sample.output_len for sample in found} == set(range(10, 31))
    assert len({tuple(sample.prompt[:4]) for sample in found}) == 1
    assert len({tuple(sample.prompt[4:8]) for sample in found}) == 300
    assert all(16 <= token < 1000 for sample in found for token in sample.prompt)
    exact = tokens().samples(5, 7, 3, 0.0)
    assert [(len(each.prompt), each.output_len) for each in exact] == [(7, 3)] * 5


@pytest.mark.parametrize(
    ("args", "words"),
    [((1, 0, 5, 0.0), "at least 1"), ((1, 5, 5, 1.0), r"\[0, 1\)"), ((1, 5, 5, -0.1), r"\[0, 1\)")],
)
def test_lengths_that_are_refused(args: tuple, words: str) -> None:
    with pytest.raises(UserError, match=words):
        tokens().samples(*args)


def test_lines_with_prompts_or_lengths(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    lines = [
        {"prompt": "abc", "output_tokens": 3},
        {"prompt": [7, 8], "output_tokens": 4, "more": 1},
        {"input_len": 6, "output_tokens": 5},
    ]
    file.write_text("\n\n".join(map(json.dumps, lines)) + "\n")
    found = list(read_custom(file, tokens(), None))
    assert found[:2] == [Sample("abc", 3), Sample([7, 8], 4)]
    assert (len(found[2].prompt), found[2].output_len) == (6, 5)
    assert {sample.output_len for sample in read_custom(file, tokens(), 9)} == {9}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "line 1: is not JSON"),
        ("3", "line 1: should be an object"),
        ('{"prompt": "a"}', "line 1: needs output_tokens"),
        ('{"prompt": "", "output_tokens": 1}', "line 1: needs prompt"),
        ('{"input_len": true, "output_tokens": 1}', "line 1: needs prompt"),
        ('{"prompt": "a", "output_tokens": 0}', "line 1: needs output_tokens"),
    ],
)
def test_lines_that_are_refused(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(text)
    with pytest.raises(UserError, match=words):
        list(read_custom(file, tokens(), None))


def test_conversations(tmp_path: Path) -> None:
    file = tmp_path / "chats.json"
    turns = [[{"value": "how?"}, {"value": "a b c"}], [{"value": "alone"}], [{}, {"value": "x"}]]
    file.write_text(json.dumps([*({"conversations": each} for each in turns), 3]))
    assert list(read_sharegpt(file, None, lambda text: len(text.split()))) == [Sample("how?", 3)]
    assert list(read_sharegpt(file, 8, None)) == [Sample("how?", 8)]
    with pytest.raises(UserError, match="--output-len"):
        list(read_sharegpt(file, None, None))
    with pytest.raises(UserError, match="cannot read"):
        list(read_sharegpt(tmp_path / "none", 8, None))


def test_as_many_as_wanted() -> None:
    samples = [Sample(str(n), 1) for n in range(5)]
    assert set(chosen(iter(samples), 5, random.Random(0))) == set(samples)
    assert len(chosen(iter(samples), 12, random.Random(0))) == 12
    with pytest.raises(UserError, match="no request"):
        chosen(iter([]), 5, random.Random(0))
