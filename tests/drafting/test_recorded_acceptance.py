"""``dsa-eval --record`` leaves acceptance in an artifact, and engines over it warn below that."""

import json
import logging
import shutil

import pytest

from dsa_compile.artifact.acceptance import AcceptanceRecord, Counted, MeasuredText
from dsa_compile.artifact.reader import Artifact
from dsa_compile.cli.eval import main
from dsa_compile.errors import ArtifactError
from dsa_compile.measure.eval.acceptance_record import counted
from dsa_compile.measure.eval.texts import HELD_OUT
from dsa_compile.runtime import Engine, SamplingParams
from dsa_compile.runtime.acceptance_watch import AcceptanceWatch
from dsa_compile.runtime.execution import draft_rows

LONG = SamplingParams(max_tokens=80, temperature=0.0, ignore_eos=True)


def record_of(*depths: Counted, digest: str = "", sampled: bool = False) -> AcceptanceRecord:
    return AcceptanceRecord.of(digest, (MeasuredText("text", sampled, depths),))


def found_after(watch: AcceptanceWatch, steps: int, right, *, sampled: bool = False) -> int | None:
    """The step, from 1, at which a problem is first seen; ``right(n)`` is what step n accepts."""
    for step in range(1, steps + 1):
        watch.add(sampled, 1, int(right(step)))
        if watch.problem:
            return step
    return None


def test_a_share_as_recorded_is_never_a_problem():
    watch = AcceptanceWatch(record_of(Counted(400, 320, 2.0)))
    assert found_after(watch, 20_000, lambda step: step % 5 > 0) is None


def test_wrong_drafts_are_reported_when_chance_no_longer_explains_them(caplog):
    """The more drafts were recorded, and the less answers differ, the sooner."""
    seen = {
        counts: found_after(AcceptanceWatch(record_of(Counted(*counts))), 5000, lambda step: False)
        for counts in ((4000, 3200, 1.0), (400, 320, 1.0), (400, 320, 4.0))
    }
    quick, usual, varied = seen.values()
    assert 5 < quick < usual < varied < 200
    assert len(caplog.records) == 3  # once each
    assert "0% of the last" in caplog.text
    assert "80% when the artifact was evaluated (greedy answers)" in caplog.text


def test_few_drafts_on_record_prove_nothing():
    watch = AcceptanceWatch(record_of(Counted(6, 6, 1.0)))
    assert found_after(watch, 30, lambda step: False) is None


def test_a_problem_ends_with_drafts_that_are_right_again():
    watch = AcceptanceWatch(record_of(Counted(4000, 3200, 1.0)))
    found_after(watch, 200, lambda step: False)
    for _ in range(3000):
        watch.add(False, 1, 1)
    assert not watch.problem


def test_sampled_answers_have_a_record_of_their_own():
    counts = Counted(4000, 3200, 1.0)
    assert found_after(AcceptanceWatch(record_of(counts)), 500, lambda n: 0, sampled=True) is None
    sampled = AcceptanceWatch(record_of(counts, sampled=True))
    assert found_after(sampled, 500, lambda n: 0, sampled=True) is not None


def test_the_text_with_the_worst_drafts_counts():
    texts = (("prose", 300), ("code", 120), ("unread", 0))
    measured = tuple(
        MeasuredText(name, False, (Counted(400 if right else 0, right, 1.0),))
        for name, right in texts
    )
    assert AcceptanceRecord.of("", measured).lowest(False) == (Counted(400, 120, 1.0),)


def test_answers_that_differ_say_less():
    alike, apart = ([[1, 0] * 20] * 8, [[1] * 40] * 4 + [[0] * 40] * 4)
    (even,), (uneven,) = counted(alike, 1), counted(apart, 1)
    assert (even.accepted, even.drafts) == (uneven.accepted, uneven.drafts) == (160, 320)
    assert even.dispersion == 1
    assert uneven.dispersion > 30
    assert uneven.bounds(2)[0] < even.bounds(2)[0] < 0.5 < even.bounds(2)[1] < uneven.bounds(2)[1]


@pytest.fixture
def measured(artifact, tmp_path):
    """A copy of the artifact, and its record by ``dsa-eval`` along two texts."""
    path = shutil.copytree(artifact, tmp_path / "measured")
    text = HELD_OUT.read_text()
    files = {"prose.txt": text[:9000], "repeated.txt": "the same line, again\n" * 300}
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    given = ["--only", "mtp", "--context", "64", "--sequences", "1", "--draft-prompts", "6"]
    given += ["--generate", "24", "--depth", "2", "--record", "--quiet", "--json", "--text"]
    out = tmp_path / "out.json"
    assert main([str(path), *given, *(str(tmp_path / f) for f in files), "-o", str(out)]) == 0
    return path, json.loads(out.read_text())["artifacts"][0]


def test_an_evaluation_is_recorded_by_text_and_changes_no_checksum(measured, artifact):
    path, results = measured
    digest = Artifact.open(path).manifest.digest
    assert digest == Artifact.open(artifact).manifest.digest
    record = AcceptanceRecord.read(path, digest)
    rows = results["measured"]["Acceptance"]
    texts = [text.text for text in record.texts if not text.sampled]
    assert [name.rpartition("/")[2] for name in texts] == ["prose.txt", "repeated.txt"]
    for text in (text for text in record.texts if not text.sampled):
        own = [r for r in rows if r["text"] == text.text and r["source"] == "an engine's steps"]
        assert [(r["drafts"], r["accepted"]) for r in own] == [
            (c.drafts, c.accepted) for c in text.depths
        ]
    assert len([text for text in record.texts if text.sampled]) == 2
    engine = Engine.load(path, num_gpu_blocks_override=40, num_speculative_tokens=2)
    engine.generate([[5, 6, 7]], LONG)
    assert not engine.stats().acceptance_problem
    assert AcceptanceRecord.read(path, "0" * 64) is None  # of another compilation


def test_an_engine_warns_when_drafting_breaks(artifact, tmp_path, text, monkeypatch, caplog):
    path = shutil.copytree(artifact, tmp_path / "broken")
    digest = Artifact.open(path).manifest.digest
    record_of(Counted(2000, 1500, 2.0), digest=digest).write(path)
    tokens_of = draft_rows.following_tokens
    monkeypatch.setattr(
        draft_rows, "following_tokens", lambda *given: torch_zeros(tokens_of(*given))
    )
    with Engine.load(path, num_gpu_blocks_override=200, num_speculative_tokens=1) as engine:
        prompts = [text[1000 * n : 1000 * n + 20] for n in range(4)]
        with caplog.at_level(logging.WARNING, "dsa_compile.runtime"):
            engine.generate(prompts, LONG)
        assert "drafts are right too rarely" in engine.stats().acceptance_problem
    assert caplog.text.count("drafts are right too rarely") == 1


def torch_zeros(tokens):
    return tokens.new_zeros(tokens.shape)


@pytest.mark.parametrize(
    "content",
    [
        "nonsense",
        '{"version": 1}',
        '{"version": 9, "digest": "", "texts": []}',
        '{"version": 1, "digest": "", "texts": [{"text": "", "sampled": false, "depths": '
        '[{"drafts": 1, "accepted": 2, "dispersion": 1.0}]}]}',
    ],
)
def test_a_file_that_is_no_record_is_refused(tmp_path, content):
    (tmp_path / "acceptance.json").write_text(content)
    with pytest.raises(ArtifactError, match=r"acceptance\.json"):
        AcceptanceRecord.read(tmp_path, "")


def test_without_draft_plans_there_is_nothing_to_record(plain, capsys):
    assert main([str(plain), "--only", "perplexity", "--record"]) == 2
    assert "--only leaves them out; add mtp" in capsys.readouterr().err
