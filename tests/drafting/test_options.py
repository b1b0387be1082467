"""Drafts that an engine cannot make are reported when it is loaded."""

import pytest

from dsa_compile.artifact.reader import Artifact
from dsa_compile.errors import UserError
from dsa_compile.runtime import Engine, EngineOptions, SamplingParams
from dsa_compile.runtime.loading.drafts import Drafts, drafts_of
from dsa_compile.runtime.loading.load_runner import load_runner
from dsa_compile.runtime.scheduling.stats import EAGER
from tests.replayed_calls import replay_calls

from .conftest import sizes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"draft": "mtp"}, "has no draft plan; compile with --draft mtp"),
        ({"num_speculative_tokens": 2}, "has no draft plan; compile with --draft mtp"),
        ({"draft": "ngram", "async_scheduling": True}, "drafts that are looked up need"),
        (
            {"draft": "ngram", "num_speculative_tokens": 4, "max_num_batched_tokens": 39,
             "max_num_seqs": 8},
            "have no room for the drafts of max_num_seqs=8 requests; use at least 40",
        ),
    ],
)  # fmt: skip
def test_loading_reports_what_cannot_be_drafted(plain, options, message):
    with pytest.raises(UserError, match=message):
        load_runner(plain, EngineOptions(num_gpu_blocks_override=4, **options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_speculative_tokens": 5}, r"must be an integer in \[0, 4\]"),
        ({"num_speculative_tokens": True}, r"must be an integer in \[0, 4\]"),
        ({"draft": "eagle"}, "unknown draft 'eagle'; choose one of mtp, ngram, none"),
        ({"draft": "none", "num_speculative_tokens": 1}, "contradicts draft='none'"),
    ],
)
def test_options_that_cannot_be_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        EngineOptions(**options)


def test_an_artifact_has_a_default(artifact, plain):
    def drafts(path, **options):
        return drafts_of(path, Artifact.open(path).manifest, EngineOptions(**options))

    assert drafts(artifact) == Drafts(1, planned=True)
    assert drafts(artifact, num_speculative_tokens=4) == Drafts(4, planned=True)
    assert drafts(artifact, num_speculative_tokens=0) == Drafts(0, planned=False)
    assert drafts(artifact, draft="none") == Drafts(0, planned=False)
    assert drafts(artifact, draft="ngram") == Drafts(3, planned=False)
    assert drafts(plain) == Drafts(0, planned=False)
    assert drafts(plain, draft="ngram", num_speculative_tokens=2) == Drafts(2, planned=False)
    assert drafts(plain, draft="ngram", num_speculative_tokens=0) == Drafts(0, planned=False)


def test_stats_count_drafts_by_depth(make_engine, text):
    engine: Engine = make_engine(2, "mtp")
    assert (engine.stats().drafted, engine.stats().accepted_length) == ((), 1.0)
    outputs = engine.generate([text[:30], text[50:70]])
    stats = engine.stats()
    for name in ("drafted", "accepted"):
        each = [getattr(output, name) for output in outputs]
        assert tuple(map(sum, zip(*each, strict=True))) == getattr(stats, name)
    assert len(stats.drafted) == len(stats.accepted) == 2
    assert all(a <= d for a, d in zip(stats.accepted, stats.drafted, strict=True))
    assert stats.accepted[0] >= stats.accepted[1]
    assert 1 < stats.accepted_length <= 3


def test_captured_steps_yield_the_tokens_of_launched_ones(artifact, text, monkeypatch):
    """Of one to five requests, with three drafts of each of up to four and none of five."""
    replay_calls(monkeypatch)
    options = EngineOptions(
        num_gpu_blocks_override=64,
        max_num_seqs=8,
        num_speculative_tokens=3,
        draft_max_rows=4,
    )
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    prompts = [text[40 * n : 40 * n + 20 + 9 * n] for n in range(5)]
    found = []
    for captured in (False, True):
        runner = load_runner(artifact, options)
        if captured:
            runner.capture(sizes(runner, 4))
        engine = Engine(runner, options)
        outputs = engine.generate(prompts[:1], params) + engine.generate(prompts, params)
        found.append([out.token_ids for out in outputs])
    assert found[0] == found[1]
    replayed = {kind.graph for kind in runner._padded.steps}
    assert replayed >= {"1", "6"}
    assert EAGER not in replayed


def test_a_runner_gives_up_its_graphs_and_its_drafts(artifact):
    runner = load_runner(
        artifact, EngineOptions(num_gpu_blocks_override=4, num_speculative_tokens=1)
    )
    runner._padded._captured["a graph"] = object()
    runner.drop_graphs()
    assert not runner._padded._captured
    plain = runner.without_drafts()
    assert plain.num_drafts == 0
    assert plain.caches is runner.caches
