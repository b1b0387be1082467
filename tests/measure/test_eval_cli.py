import json
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from dsa_compile.cli.eval import main
from dsa_compile.measure.eval import suite
from tests.measure.broken import with_spec

SMALL = [
    "--tokens", "600", "--context", "200", "--distances", "90,120", "--prompts", "2",
    "--sequences", "1", "--draft-prompts", "2", "--generate", "6", "--greedy-prompts", "8",
    "--quiet",
]  # fmt: skip


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("texts") / "text.txt"
    path.write_text("Some words that every line has, again and again.\n" * 40)
    return path


def run(*arguments):
    return main([str(argument) for argument in arguments])


@pytest.mark.slow
def test_everything_in_one_table(artifact, text, tmp_path, capsys):
    out = tmp_path / "results.json"
    code = run(
        artifact, artifact, "--text", text, "--control", "all", "--reference", artifact,
        "--against-hf", "--output", out, *SMALL,
    )  # fmt: skip
    printed = capsys.readouterr()
    assert code == 0, printed
    assert printed.err == ""
    for word in ("interleaved", "@120", "recall", "worst row", "generated", "8/8", str(artifact)):
        assert word in printed.out
    results = json.loads(out.read_text())
    assert results["complete"]
    assert results["settings"]["distances"] == [90, 120]
    first, second = results["artifacts"]
    # one artifact given twice: everything is a function of artifact and options
    assert first["measured"] == second["measured"]
    measured = first["measured"]
    assert {kind: len(rows) for kind, rows in measured.items()} == {
        "Perplexity": 5,
        "Recall": 10,
        "Overlap": 4 * 4 * 3,
        "Acceptance": 5,
        "LayerError": 6,
        "LogitAgreement": 2,
        "GreedyAgreement": 1,
    }
    assert measured["Perplexity"][0]["per_token"] > 1
    assert measured["LogitAgreement"][1]["max_abs"] < 1e-4
    assert measured["GreedyAgreement"][0]["identical"] == 8
    assert set(first["seconds"]) == {"perplexity", "recall", "indexer", "mtp", "layers", "hf"}


def test_only_what_is_asked_for(artifact, text, capsys):
    assert run(artifact, "--text", text, "--only", "perplexity", *SMALL) == 0
    printed = capsys.readouterr().out
    assert "sparse" in printed
    assert "dense" in printed
    assert "@90" not in printed
    assert "Drafts" not in printed


@pytest.mark.slow
def test_a_plot_is_drawn(artifact, text, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "results.png"
    assert run(artifact, "--text", text, "--only", "indexer,mtp", "--plot", path, *SMALL) == 0
    assert path.read_bytes().startswith(b"\x89PNG")


def test_without_a_tokenizer_text_is_left_out(loaded, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(
        suite,
        "LoadedArtifact",
        SimpleNamespace(open=lambda *given: replace(loaded, tokenizer=None)),
    )
    out = tmp_path / "results.json"
    assert run(loaded.artifact.path, "-o", out, *SMALL) == 1
    printed = capsys.readouterr().out
    assert "fp32: not measured: perplexity: fp32 came without a tokenizer" in printed
    assert "fp32: not measured: recall:" in printed
    (found,) = json.loads(out.read_text())["artifacts"]
    assert set(found["measured"]) == {"Overlap", "Acceptance"}
    assert len(found["notes"]) == 2


def test_without_a_module_for_drafts_the_rest_goes_on(loaded, text, capsys, monkeypatch):
    bare = with_spec(loaded, num_nextn_predict_layers=0)
    monkeypatch.setattr(suite, "LoadedArtifact", SimpleNamespace(open=lambda *given: bare))
    path = loaded.artifact.path
    assert run(path, "--text", text, "--only", "mtp,perplexity", *SMALL) == 1
    printed = capsys.readouterr().out
    assert "num_nextn_predict_layers 0: the model cannot draft" in printed
    assert "dense" in printed


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, RuntimeError])
def test_what_was_measured_survives_an_interruption(
    artifact, text, tmp_path, capsys, monkeypatch, interruption
):
    def stop(model, prompts, selection, tick):
        if selection == "dense":
            raise interruption
        return original(model, prompts, selection, tick)

    original = suite.measure_recall
    monkeypatch.setattr(suite, "measure_recall", stop)
    out = tmp_path / "results.json"
    arguments = (artifact, "--text", text, "-o", out, *SMALL)
    if interruption is KeyboardInterrupt:
        assert run(*arguments) == 130
    else:
        with pytest.raises(RuntimeError):
            run(*arguments)
    results = json.loads(out.read_text())
    assert not results["complete"]
    measured = results["artifacts"][0]["measured"]
    assert len(measured["Perplexity"]) == 2
    assert [row["selection"] for row in measured["Recall"]] == ["sparse", "sparse"]
    assert "Perplexity" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{artifact}", "--only", "speed"], "unknown measure 'speed'; choose one of perplexity"),
        (["{artifact}", "--control", "best"], "unknown control 'best'; choose one of random"),
        (["{artifact}", "--only", "layers"], "needs an artifact to compare with: --reference"),
        (["{artifact}", "--context", "513"], "exceeds the model's limit of 512 tokens"),
        (["{artifact}", "--prompts", "0"], "--prompts must be an integer >= 1; got 0"),
        (["{artifact}", "--distances", "9,x"], "'x' is not a number such as 4096"),
        (["{artifact}", "--generate", "4"], "--generate must be more than --depth; got 4"),
        (["{artifact}", "--text", "{folder}/none"], "none: cannot be read (No such file"),
        (["{artifact}", "--text", "{folder}/empty"], "empty: empty; give text"),
        (["{artifact}", "--text", "{folder}/binary"], "binary: not UTF-8 text"),
        (["{artifact}", "{folder}/none"], "none: no such directory"),
        (["{artifact}", "-o", "{folder}/none/x.json"], "x.json: cannot be written"),
        ([], "the following arguments are required: ARTIFACT"),
    ],
)
def test_wrong_input_gets_one_line_and_status_2(artifact, tmp_path, capsys, arguments, message):
    (tmp_path / "empty").touch()
    (tmp_path / "binary").write_bytes(b"\x80\x81")
    places = {"artifact": artifact, "folder": tmp_path}
    assert run(*(argument.format(**places) for argument in arguments)) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    assert line.startswith("dsa-eval: error: ")
    assert message in line


def test_a_text_too_short_for_the_sequences_is_noted(artifact, tmp_path, capsys):
    (tmp_path / "short").write_text("Only a few words in this one.")
    code = run(artifact, "--text", tmp_path / "short", "--only", "perplexity,mtp", *SMALL)
    printed = capsys.readouterr().out
    assert code == 1
    assert "200 in a row are needed; give more text or a smaller --context" in printed
    assert "dense" in printed


def test_help_does_not_wait_for_torch():
    code = "import sys, dsa_compile.cli.eval as e; e.build_parser(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
