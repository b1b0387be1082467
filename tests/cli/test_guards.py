"""Hostile input: what commands print and touch when they get some."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import dsa_compile
from dsa_compile.artifact.atomic_directory import AtomicDirectory
from dsa_compile.cli import bench as bench_cli
from dsa_compile.cli import compile as compile_cli
from dsa_compile.cli.common import complain, printable
from dsa_compile.errors import ArtifactError, UserError
from dsa_compile.measure import lock
from dsa_compile.ops.pointwise import chain
from tests.artifact.building import build, edit_manifest, save_model


def test_errors_hold_nothing_that_a_terminal_obeys(capsys):
    complain("dsa", "file '\x1b[2J\x9b31m\u202e\udce9\0' is\nbad: é")
    assert capsys.readouterr().err == (
        "dsa: error: file '\\x1b[2J\\x9b31m\\u202e\\udce9\\x00' is bad: é\n"
    )
    assert printable("a\tb\n日本") == "a\tb\n日本"


def test_a_full_disk_is_one_line() -> None:
    """Results that Python still holds at the end count, too."""
    command = [sys.executable, "-m", "dsa_compile.cli.compile", "--list-passes"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2
    assert done.stderr == "dsa-compile: error: cannot write: No space left on device\n"


@pytest.mark.parametrize("listed", [False, True])
def test_force_removes_no_file_that_it_did_not_write(tmp_path, listed):
    """With a manifest copied into a folder of somebody's files, even one that lists them."""
    artifact = tmp_path / "artifact"
    build(artifact, save_model(tmp_path / "model"))
    (artifact / "thesis.txt").write_text("years of work")
    if listed:
        record = {"path": "thesis.txt", "size": 13, "sha256": "0" * 64}
        edit_manifest(artifact, lambda data: data["files"].append(record))
    with pytest.raises(ArtifactError, match=r"thesis\.txt: not a file of the artifact"):
        AtomicDirectory(artifact, force=True)
    assert (artifact / "thesis.txt").read_text() == "years of work"


def test_force_replaces_an_artifact_with_the_report_of_verify(tmp_path):
    artifact = tmp_path / "artifact"
    model = save_model(tmp_path / "model")
    build(artifact, model)
    (artifact / "verify.json").write_text("{}")
    build(artifact, model, force=True)
    assert not (artifact / "verify.json").exists()


def test_an_output_with_a_null_character(tmp_path):
    with pytest.raises(ArtifactError, match="holds a null character"):
        AtomicDirectory(tmp_path / "a\0b", force=False)


def test_a_profile_that_is_missing_is_an_error_on_every_target(tmp_path):
    with pytest.raises(UserError, match="no such profile"):
        dsa_compile.compile(tmp_path, tmp_path / "out", profile=str(tmp_path / "no.json"))


def test_the_lock_of_another_user(tmp_path, monkeypatch):
    path = tmp_path / "lock"
    monkeypatch.setenv("DSA_GPU_LOCK", str(path))
    with lock.shared():
        assert path.stat().st_mode & 0o222 == 0o200
    path.chmod(0o444)  # another's: to be read
    with lock.exclusive():
        pass
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="cannot be opened to lock the GPU"), lock.shared():
        pass
    assert not (tmp_path / "elsewhere").exists()


def test_kernels_without_triton(monkeypatch, capsys):
    monkeypatch.setattr(bench_cli, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["dsa-bench", "kernels"])
    assert bench_cli.main() == 2
    assert "needs triton" in capsys.readouterr().err


@pytest.mark.parametrize(
    "program",
    [
        {"inputs": 10**9, "calls": [], "results": ["%0"]},
        {"inputs": 1, "calls": [["aten.relu.default", ["%0"]]] * 1001, "results": ["%0"]},
    ],
)
def test_a_chain_of_a_billion_inputs(program):
    with pytest.raises(ValueError, match="pointwise"):
        chain(json.dumps(program))


def test_a_chain_nested_too_deeply():
    with pytest.raises(ValueError, match="pointwise"):
        chain('{"inputs": 1, "calls": ' + "[" * 20_000)


def test_an_interrupt_while_a_command_is_imported():
    """No traceback before ``main`` is reached either."""
    code = "import dsa_compile.cli; raise KeyboardInterrupt"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode in (130, -signal.SIGINT)
    assert done.stderr.count("\n") == 1
    assert "interrupted" in done.stderr


def test_arguments_that_are_not_utf8(tmp_path):
    """As a shell hands them over: ``--prompt $'caf\\xe9'``."""
    command = [sys.executable, "-m", "dsa_compile.cli.compile", b"caf\xe9", "-o", b"\xe9/\xff"]
    done = subprocess.run(command, capture_output=True, env=os.environ | {"LC_ALL": "C.UTF-8"})
    assert done.returncode == 2
    assert done.stderr.count(b"\n") == 1
    done.stderr.decode("utf-8")


def test_compiling_needs_no_terminal_either(tmp_path: Path, capsys):
    assert compile_cli.main([str(tmp_path / "\x1b[31m"), "-o", str(tmp_path / "out")]) == 2
    assert "\x1b" not in capsys.readouterr().err
