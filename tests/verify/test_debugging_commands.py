"""``dsa-inspect ARTIFACT verify`` and ``bisect``."""

import json
import os
import shutil
from pathlib import Path

import pytest
from torch import fx

from dsa_compile.cli.inspect import model as inspect_model
from dsa_compile.cli.inspect.command import main
from dsa_compile.ir.edit import Editor
from dsa_compile.lowering.compile_model import compile_model
from dsa_compile.passes.pack_swiglu import PackSwiglu
from dsa_compile.runtime import Engine, SamplingParams
from dsa_compile.verify.recompiled_artifact import RecompiledArtifact


@pytest.fixture
def opened(recompiled: RecompiledArtifact, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening the artifact of all tests takes no time."""
    monkeypatch.setattr(inspect_model, "open_recompiled", lambda args, _=None: recompiled)


def answer(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str, str]:
    """Exit status, standard output, standard error."""
    status = main([str(arg) for arg in args])
    done = capsys.readouterr()
    return status, done.out, done.err


@pytest.mark.slow
def test_a_right_artifact_is_verified(artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = answer(capsys, artifact, "verify", "--tokens", 27)
    assert (status, err) == (0, "")
    assert "all right" in out
    assert "recognize_sparse_attention" in out
    report = json.loads((artifact / "verify.json").read_text())
    assert report["ok"] is True
    assert report["contexts"] == [8, 16, 24, 25, 26, 19, 27]
    assert [done["name"] for done in report["passes"]][:2] == ["export", "strip_noise"]


@pytest.mark.usefixtures("opened")
def test_of_one_pass_as_data(artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A report of all passes stays."""
    file = artifact / "verify.json"
    rows = [{"name": "absorb_mla"}, {"name": "export"}]
    file.write_text(whole := json.dumps({"passes": rows}))
    args = ("--pass", "absorb_mla", "--json", "--tokens", 27)
    status, out, err = answer(capsys, artifact, "verify", *args)
    assert err == f"{file} stays: it is of more passes\n"
    assert file.read_text() == whole
    file.write_text(json.dumps({"passes": rows[:1]}))
    status, out, err = answer(capsys, artifact, "verify", *args)
    assert (err, json.loads(file.read_text())) == ("", json.loads(out))
    report = json.loads(out)
    assert status == 0
    assert [done["name"] for done in report["passes"]] == ["absorb_mla"]
    assert {site["layer"] for site in report["sites"]} == {0, 1}
    assert all(0 < site["error"] < site["tolerance"] for site in report["sites"])


def test_an_artifact_that_is_not_what_the_passes_make(
    model_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "artifact"
    with monkeypatch.context() as patch:  # another version of a pass
        patch.setattr(PackSwiglu, "rewrite", lambda self, edit, program: None)
        patch.setattr(PackSwiglu, "expects", lambda self, program, region: None)
        compile_model(model_dir, path, disable=("merge_shared_expert",), records=False)
    status, out, _ = answer(capsys, path, "verify", "--pass", "pack_swiglu", "--tokens", 27)
    assert status == 1
    assert "artifact: graph dense.long is not what the passes make" in out


def test_random_weights(artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ("--dummy", "--pass", "insert_paged_caches", "--tokens", 27)
    status, out, _ = answer(capsys, artifact, "verify", *args)
    assert status == 0
    assert "all right" in out


@pytest.mark.usefixtures("opened")
@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["verify", "--pass", "absorb_ml"], "no pass 'absorb_ml' ran; did you mean 'absorb_mla'?"),
        (["verify", "--device", "cuda"], "--device cuda: the artifact is for the CPU"),
        (["verify", "--tokens", "1"], "a prompt must have from 2 to 4096 tokens, not 1"),
        (["verify", "--tokens", "9", "--prompt-ids", "1"], "exclude one another"),
        (["verify", "--prompt-ids", "1 two"], "give token ids such as"),
        (["verify", "--prompt-ids", "1 512"], "token id 512 is out of range"),
        (["verify", "--prompt", "text"], "text needs a tokenizer"),
        (["bisect", "--expect", "3"], "say what the tokens should follow, with --prompt"),
        (["bisect", "--prompt-ids", "1 2", "--expect", "512"], "the model has no token 512"),
        (["bisect", "--prompt-ids", "1 2", "--expect", ""], "give at least one token id"),
        (["bisect", "--check", "true"], "say where the artifact goes with {artifact}"),
        (["bisect", "--check", "no-such-program {artifact}"], "the shell cannot run"),
        (["bisect", "--check", "true {artifact}"], "passes on the artifact as it is compiled"),
        (["bisect", "--check", "true {artifact}", "--limit", "1"], "--limit goes with --against"),
    ],
)
def test_bad_input(
    artifact: Path,
    tmp_path: Path,
    args: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = ["--out", str(tmp_path / "out")] if args[0] == "bisect" else []
    status, _, err = answer(capsys, artifact, *args, *out)
    assert status == 2
    assert err.startswith("dsa-inspect: error: ")
    assert err.count("\n") == 1
    assert message in err


def test_an_artifact_without_its_model(
    model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, moved = tmp_path / "artifact", tmp_path / "model"
    compile_model(model_dir, path, weights="pack", records=False)
    status, _, err = answer(capsys, path, "verify")
    assert status == 2
    assert "name the model with --model-dir" in err
    shutil.copytree(model_dir, moved)
    args = ("--model-dir", moved, "--pass", "absorb_mla", "--tokens", 27)
    assert answer(capsys, path, "verify", *args)[0] == 0


@pytest.mark.usefixtures("opened")
def test_a_command_finds_the_pass_and_goes_on_after_an_interruption(
    artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check = "! grep -rq swiglu_packed {artifact}/graphs"
    args = ("bisect", "--check", check, "--out", tmp_path, "--tokens", 27)
    status, out, _ = answer(capsys, artifact, *args)
    assert status == 0
    assert "culprit:    pack_swiglu site 1 (dense mlp)" in out
    assert (tmp_path / "reproducer" / "reproduce.py").is_file()
    state = json.loads((tmp_path / "bisect.json").read_text())
    state["trials"] = state["trials"][:3]
    (tmp_path / "bisect.json").write_text(json.dumps(state))
    status, again, _ = answer(capsys, artifact, *args)
    assert status == 0
    assert "3 of them earlier" in again
    assert again.splitlines()[-4:] == out.splitlines()[-4:]


@pytest.mark.usefixtures("opened")
def test_tokens_that_nobody_gives(
    artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ("bisect", "--prompt-ids", "1 2 3", "--expect", "4 5", "--out", tmp_path)
    status, out, _ = answer(capsys, artifact, *args)
    assert status == 1
    assert "no pass is to blame" in out
    assert "the check itself expects something else" in out


@pytest.mark.usefixtures("opened")
def test_tokens_that_come(
    artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    params = SamplingParams(max_tokens=4, temperature=0.0)
    (output,) = Engine.load(artifact).generate([[1, 2, 3]], params)
    ids = " ".join(map(str, output.token_ids))
    args = ("bisect", "--prompt-ids", "1 2 3", "--expect", ids, "--out", tmp_path)
    status, _, err = answer(capsys, artifact, *args)
    assert status == 2
    assert "(the expected tokens): there is nothing to bisect" in err


@pytest.mark.slow
@pytest.mark.usefixtures("opened")
def test_a_healthy_artifact_is_an_answer(
    artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ("bisect", "--against", "reference", "--out", tmp_path)
    status, out, err = answer(capsys, artifact, *args)
    assert (status, err) == (0, "")
    verdict, searched, right, *_ = out.splitlines()
    assert verdict == "nothing wrong found"
    assert searched.startswith("searched:   1 trial for ")
    assert right.startswith("right:      the finished graphs (error ")


@pytest.mark.usefixtures("opened")
def test_within_a_limit_nothing_is_wrong_and_the_rest_is_not_tested(
    artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ("bisect", "--limit", "0.5", "--json", "--out", tmp_path)  # against the reference
    status, out, _ = answer(capsys, artifact, *args)
    found = json.loads(out)
    assert (status, found["cause"], found["name"], found["trials"]) == (0, "none", "", 1)
    assert "--limit 0.5" in found["untested"][-1]


@pytest.mark.usefixtures("opened")
def test_verdicts_come_first_in_80_columns(
    artifact: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(artifact.parent)
    args = ("--tokens", 27, "--pass", "absorb_mla", "--pass", "fuse_add_norm_across_layers")
    _, right, _ = answer(capsys, artifact.name, "verify", *args)
    assert right.startswith("all right: ")
    assert "next:       dsa-inspect artifact bisect --against reference\n" in right
    assert "times below it: absorb_mla site" in right
    out = ("--out", tmp_path.name)
    monkeypatch.chdir(tmp_path.parent)
    path = os.path.relpath(artifact)
    check = ("bisect", "--check", "! grep -rq swiglu_packed {artifact}/graphs", "--tokens", 27)
    _, found, _ = answer(capsys, path, *check, *out)
    assert found.startswith("culprit:    pack_swiglu site 1 (dense mlp)\nsearched:   ")
    assert "with it:    exit status 1\nwithout:    exit status 0\n" in found
    assert found.endswith(f"next:       dsa-inspect {path} diff pack_swiglu --site 1\n")
    for printed in (right, found):
        assert [line for line in printed.splitlines() if len(line) > 80] == []


def test_a_wrong_rewrite_is_the_verdict_in_80_columns(
    model_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    take = Editor.take

    def swapped(self: Editor, several: fx.Node, index: int, old: fx.Node, name: str) -> None:
        other = 1 - index if self.pass_name == "fuse_add_norm" else index
        take(self, several, other, old, name)

    monkeypatch.setattr(Editor, "take", swapped)
    compile_model(model_dir, Path("bad"), block_size=16)
    args = ("verify", "--tokens", 27, "--pass", "fuse_add_norm")
    status, out, _ = answer(capsys, "bad", *args)
    assert status == 1
    verdict, wrong, *rest = out.splitlines()
    assert verdict.startswith("2 wrong: 2 rewrites, ")
    assert wrong.startswith("wrong:      fuse_add_norm site 1 (dense post_attention_layernorm), ")
    assert "next:       dsa-inspect bad diff fuse_add_norm --site 1" in rest
    assert [line for line in out.splitlines() if len(line) > 80] == []
