"""``dsa-inspect ARTIFACT draft``: what was drafted for each token of an answer."""

import json

import pytest

from dsa_compile.cli.inspect.command import main
from dsa_compile.measure.eval.draft_trace import trace_drafts
from dsa_compile.runtime import SamplingParams

TOKENS = 24


@pytest.fixture(scope="module")
def trace(artifact, text):
    return trace_drafts(artifact, text[:30], TOKENS, num_speculative_tokens=3)


def test_the_answer_is_that_of_an_engine(trace, make_engine, text):
    engine = make_engine(3, "mtp")
    (output,) = engine.generate([text[:30]], greedy())
    assert [token.token for token in trace.tokens] == output.token_ids
    assert (tuple(trace.drafted), tuple(trace.accepted)) == (output.drafted, output.accepted)
    assert trace.accepted_length == engine.stats().accepted_length
    assert [token.position for token in trace.tokens] == list(range(30, 30 + TOKENS))


def greedy():
    return SamplingParams(max_tokens=TOKENS, temperature=0.0)


def test_each_token_ends_its_chain_or_is_its_draft(trace):
    first, *others = trace.tokens
    assert (first.depth, first.draft, first.step) == (0, None, 0)
    seen = {"right": 0, "wrong": 0}
    for token, behind in zip(others, trace.tokens[2:], strict=False):
        assert token.accepted == (token.draft == token.token)
        assert token.margin >= 0  # greedy: no other token is likelier
        assert token.rival != token.token
        if token.draft is not None and not token.accepted:
            assert token.rival == token.draft
            seen["wrong"] += 1
        seen["right"] += token.accepted
        # a step goes on behind a right draft, and ends with any other token
        assert (behind.step == token.step) == token.accepted
    assert min(seen.values()) > 0
    assert sum(token.accepted for token in trace.tokens) == sum(trace.accepted)


def test_prompt_lookup_is_traced_without_a_plan(artifact):
    trace = trace_drafts(artifact, [5, 6, 7, 8] * 8, 16, draft="ngram")
    assert (trace.method, trace.num_drafts) == ("ngram", 3)
    assert len(trace.tokens) == 16
    assert any(token.draft is not None for token in trace.tokens)


def test_the_verdict_comes_first_in_80_columns(artifact, trace, text, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    ids = " ".join(map(str, text[:30]))
    argv = [str(artifact), "draft", "--prompt-ids", ids, "--max-tokens", str(TOKENS)]
    argv += ["--num-speculative-tokens", "3"]
    assert main(argv) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{trace.accepted_length:.2f} tokens a step that checks up to 3")
    assert max(map(len, lines)) <= 80
    assert main([*argv, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [token["token"] for token in found["tokens"]] == [t.token for t in trace.tokens]
    assert found["accepted"] == trace.accepted


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--prompt-ids", "5"], "has no draft plan; compile with --draft mtp"),
        (["--prompt-ids", "5", "--num-speculative-tokens", "0"], "nothing would be drafted"),
        (["--prompt-ids", "5", "--num-speculative-tokens", "5"], "must be an integer in [0, 4]"),
        (["--prompt-ids", "5", "--max-tokens", "1"], "give 2 or more"),
        (["--prompt-ids", "x"], "give token ids"),
    ],
)
def test_bad_input_is_one_line(plain, capsys, argv, says):
    assert main([str(plain), "draft", *argv]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1
    assert says in shown.err
