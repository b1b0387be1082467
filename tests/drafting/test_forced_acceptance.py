"""``force_accept``: steps keep so many tokens on average, right or wrong, and say so."""

import json
import logging

import pytest

from dsa_compile.artifact.manifest import open_manifest
from dsa_compile.cli.generate import main as generate
from dsa_compile.cli.serve import main as serve
from dsa_compile.errors import UserError
from dsa_compile.runtime import Engine, EngineOptions, SamplingParams
from dsa_compile.runtime.loading.drafts import drafts_of

STEPS = 20
ANSWER = 1 + 5 * STEPS // 2  # the prompt's step yields one token


@pytest.fixture(scope="module")
def engine(artifact):
    options = {"num_gpu_blocks_override": 32, "max_num_seqs": 2, "async_scheduling": True}
    return Engine.load(
        artifact, num_speculative_tokens=3, load_format="dummy", force_accept=2.5, **options
    )


@pytest.mark.parametrize("logprobs", [None, 0], ids=["on the device", "on the host"])
def test_steps_keep_the_average(engine, text, logprobs):
    params = SamplingParams(max_tokens=ANSWER, temperature=0.0, ignore_eos=True, logprobs=logprobs)
    outputs = engine.generate([text[:20], text[40:70]], params)
    for output in outputs:
        assert len(output.token_ids) == ANSWER
        # steps launched ahead near the end have fewer rows than they would keep
        assert sum(output.accepted) / output.drafted[0] == pytest.approx(1.5, abs=0.1)
        # two or three tokens, never another number
        assert output.accepted[0] >= output.drafted[0] - 1
        assert output.accepted[2] == 0
    assert engine.stats().force_accept == 2.5


def test_what_is_printed_says_so(artifact, capsys, caplog):
    argv = [str(artifact), "--prompt-ids", "5 6 7", "--json", "--ignore-eos", "--force-accept"]
    argv += [
        "3",
        "--num-speculative-tokens",
        "2",
        "--num-gpu-blocks-override",
        "8",
        "--max-tokens",
        "10",
    ]
    with caplog.at_level(logging.WARNING):
        assert generate(argv) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["acceptance_forced"] == 3.0
    assert "drafts: 3.00 tokens a step (acceptance forced); kept 100 %, 100 %" in shown.err
    assert "what is generated is not the model's" in caplog.text


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.99, 5.01, True, "2"])
def test_no_number_of_tokens_is_refused(value):
    with pytest.raises(UserError, match=r"must be a number of tokens in \[1, 5\]"):
        EngineOptions(force_accept=value)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"num_speculative_tokens": 2, "force_accept": 3.1}, "yields at most 3 tokens"),
        ({"draft": "ngram", "force_accept": 2}, "of an artifact's draft plans"),
        ({"num_speculative_tokens": 0, "force_accept": 1}, "of an artifact's draft plans"),
    ],
)
def test_what_cannot_be_kept_is_refused_at_load(artifact, options, says):
    with pytest.raises(UserError, match=says):
        drafts_of(artifact, open_manifest(artifact), EngineOptions(**options))


def test_no_server_forces_answers_of_real_weights(artifact, capsys):
    assert serve([str(artifact), "--force-accept", "2"]) == 2
    assert "its answers are not the model's" in capsys.readouterr().err
