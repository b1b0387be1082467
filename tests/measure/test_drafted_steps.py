"""``dsa-bench drafts``: what a depth costs on a CPU, and what accepted lengths make of it."""

import json
from pathlib import Path

import pytest

from dsa_compile.artifact.acceptance import AcceptanceRecord, Counted, MeasuredText
from dsa_compile.artifact.manifest import open_manifest
from dsa_compile.cli.bench import main
from dsa_compile.lowering.compile_model import compile_model
from dsa_compile.measure.step.drafted import DraftedStep, recorded_lengths
from examples.small_models.models import save_hub, tiny_config, tiny_model


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drafted-steps")
    save_hub(tiny_model(tiny_config(2, first_k_dense_replace=1)), folder / "model", fp8=False)
    out = folder / "artifact"
    compile_model(folder / "model", out, draft="mtp", recipe="fp8", weights="none")
    return out


def test_every_depth_is_timed(artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["drafts", str(artifact), "--batch", "1,3", "--context", "40", "--repeats", "2"]
    assert main([*argv, "--drafts", "0,2", "--accepted", "1.5,2", "--json"]) == 0
    steps = json.loads(capsys.readouterr().out)
    assert [(s["batch"], s["drafts"]) for s in steps] == [(1, 0), (1, 2), (3, 0), (3, 2)]
    for step in steps:
        tokens = step["batch"] * (2 if step["drafts"] else 1)
        assert step["tokens_per_second"] == pytest.approx(1e3 * tokens / step["wall"])


def test_recorded_lengths_are_taken_where_none_are_given(
    artifact: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["drafts", str(artifact), "--context", "40", "--repeats", "2", "--drafts", "0,1"]
    assert main(argv) == 2
    assert "known up to 0 drafts; give more with --accepted" in capsys.readouterr().err
    manifest = open_manifest(artifact)
    depths = (Counted(100, 80, 1.0), Counted(100, 50, 1.0))
    record = AcceptanceRecord.of(manifest.digest, (MeasuredText("a", False, depths),))
    record.write(artifact)
    assert recorded_lengths(artifact, manifest) == pytest.approx((1.8, 2.3))
    assert main(argv) == 0
    shown = capsys.readouterr().out
    assert "accepted lengths that were recorded" in shown
    assert "drafts yield most" in shown
    (artifact / "acceptance.json").unlink()


def test_tokens_are_those_of_the_accepted_length() -> None:
    assert DraftedStep(16, 2, wall=10.0).rate((1.85, 2.45)) == pytest.approx(16 * 245)
    assert DraftedStep(16, 0, wall=10.0).rate(()) == pytest.approx(1600)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--drafts", "5"], "give 0 to 4 drafts"),
        (["--accepted", "1.5,4"], "a step with k drafts yields 1 to 1 + k tokens"),
        (["--batch", "0"], "give positive numbers"),
        (["--context", "1000000"], "the model takes up to"),
    ],
)
def test_what_cannot_be_is_refused(
    artifact: Path, capsys: pytest.CaptureFixture[str], given: list[str], says: str
) -> None:
    assert main(["drafts", str(artifact), *given]) == 2
    assert says in capsys.readouterr().err
