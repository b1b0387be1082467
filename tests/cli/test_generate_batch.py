"""Requests as JSON lines: what is finished stays, what is missing is run."""

import json
import re
from pathlib import Path

import pytest

import dsa_compile.runtime
from dsa_compile.cli.generate import main
from dsa_compile.runtime import Engine
from tests.runtime.hash_runner import HashRunner, reference_tokens
from tests.trained import trained_model

VOCAB = 64
LINES = [
    {"id": "first", "prompt": [1, 2, 3], "max_tokens": 4},
    {"prompt": [4, 5], "temperature": 0.0, "logit_bias": {"7": 100}},
    {"id": 3, "prompt": [VOCAB]},
    {"prompt": [6], "max_token": 4},
    {"prompt": [9, 9], "logprobs": 1},
]


@pytest.fixture
def engines(monkeypatch):
    """The engines that were loaded."""
    made = []

    def load(path, options):
        made.append(Engine(HashRunner(256, 4, VOCAB)))
        return made[-1]

    monkeypatch.setattr(dsa_compile.runtime, "Engine", type("Stub", (), {"load": load}))
    return made


@pytest.fixture
def files(tmp_path):
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n\n".join(map(json.dumps, LINES)) + "\n")
    return source, out


def run(files) -> int:
    source, out = map(str, files)
    command = ["art", "--input", source, "--output", out, "--temperature", "0", "--max-tokens", "6"]
    return main(command)


def answers(out: Path) -> dict[int, dict]:
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert len({record["line"] for record in records}) == len(records)
    return {record["line"]: record for record in records}


def test_each_line_is_answered_with_its_options(engines, files, capsys):
    assert run(files) == 1
    found = answers(files[1])
    assert sorted(found) == [1, 3, 5, 7, 9]
    assert found[1]["token_ids"] == reference_tokens([1, 2, 3], 4, VOCAB)
    assert found[1]["id"] == "first"
    assert found[3]["token_ids"] == [7] * 6
    assert "out of range" in found[5]["error"]
    assert found[5]["id"] == 3
    assert found[7]["error"] == "unknown field 'max_token'"
    assert found[9]["token_ids"] == reference_tokens([9, 9], 6, VOCAB)
    assert len(found[9]["logprobs"]) == 6
    out, err = capsys.readouterr()
    assert re.fullmatch(r"16 tokens for 5 requests in \d+\.\d\d s: .* tok/s\n", out)
    assert err.count("dsa-generate: error: ") == 2
    assert f"{files[0]}, line 7: unknown field" in err


def test_a_batch_goes_on_where_it_stopped(engines, files, capsys):
    run(files)
    whole = answers(files[1])
    lines = files[1].read_bytes().splitlines(keepends=True)
    for kept, torn in ((0, b""), (2, b""), (3, lines[3][:20]), (5, b"")):
        files[1].write_bytes(b"".join(lines[:kept]) + torn)
        capsys.readouterr()
        run(files)
        assert answers(files[1]) == whole
        assert files[1].read_bytes().startswith(b"".join(lines[:kept]))
        shown = capsys.readouterr().out
        assert f" for {5 - kept} request" in shown
        assert (f"{kept} line" in shown) == (kept > 0)


def test_a_crash_keeps_what_was_finished(engines, files, monkeypatch):
    step = Engine.step

    def crashing(self):
        outputs = step(self)
        if any(output.num_tokens == 5 for output in outputs):
            raise KeyboardInterrupt
        return outputs

    monkeypatch.setattr(Engine, "step", crashing)
    assert run(files) == 130
    assert sorted(answers(files[1])) == [1, 5, 7]
    monkeypatch.setattr(Engine, "step", step)
    run(files)
    assert sorted(answers(files[1])) == [1, 3, 5, 7, 9]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "in.jsonl: has no requests"),
        ("{}\n", 'in.jsonl, line 1: should be an object with either "prompt" or "messages"'),
        ('{"prompt": "a"}\n[1]\n', "in.jsonl, line 2: should be an object"),
        ('{"prompt": "a"}\n{"prompt": \n', "in.jsonl, line 2: not valid JSON"),
        ('{"prompt": "a", "messages": []}\n', "line 1: should be an object with either"),
    ],
)
def test_a_malformed_input_is_refused_before_loading(engines, files, capsys, content, message):
    files[0].write_text(content)
    assert run(files) == 2
    assert message in capsys.readouterr().err
    assert not engines
    assert not files[1].exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("mine\n", "line 1: not an answer of dsa-generate; name another --output"),
        ('{"line": 1, "input_sha256": "x"}\n', "line 1: answers line 1 of another --input"),
    ],
)
def test_an_output_of_something_else_is_left_alone(engines, files, capsys, content, message):
    files[1].write_text(content)
    assert run(files) == 2
    assert message in capsys.readouterr().err
    assert files[1].read_text() == content


def test_an_output_that_is_no_file_is_refused(engines, files, capsys):
    """Answers that are there are read first: of a pipe for ever."""
    assert run((files[0], Path("/dev/null"))) == 2
    assert "/dev/null: not a regular file" in capsys.readouterr().err


def test_conversations_of_the_trained_model(tmp_path, capsys):
    artifact = tmp_path / "artifact"
    dsa_compile.compile(trained_model(), artifact)
    messages = [{"role": "user", "content": "import os\nimport"}]
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(json.dumps({"messages": messages, "max_tokens": 5}) + "\n")
    assert main([str(artifact), "--input", str(source), "--output", str(out)]) == 0
    answer = answers(out)[1]
    assert answer["message"] == {"role": "assistant", "content": answer["text"]}
    command = ["--chat", "--prompt", messages[0]["content"], "--max-tokens", "5", "--json"]
    capsys.readouterr()
    assert main([str(artifact), *command]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["token_ids"], shown["text"]) == (answer["token_ids"], answer["text"])
    assert shown["prompt"] == messages[0]["content"]
    assert shown["prompt_token_ids"][0] == 0
