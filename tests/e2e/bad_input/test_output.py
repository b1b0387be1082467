"""Outputs that are in the way, full disks, and processes that are killed."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dsa_compile.cli import compile as compile_cli
from dsa_compile.cli import generate as generate_cli
from tests.e2e.bad_input.damage import GREEDY
from tests.quick_cases import quick_first


def test_the_output_exists(compiled, source, tmp_path, refusal):
    shutil.copytree(compiled / "pack", tmp_path / "out")
    manifest = (tmp_path / "out/manifest.json").read_bytes()
    assert "out: exists already; use --force" in refusal.compiling(source)
    assert (tmp_path / "out/manifest.json").read_bytes() == manifest


def test_force_replaces_an_artifact_and_nothing_else(source, model, tmp_path, refusal):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/thesis.txt").write_text("years of work")
    assert "holds files but no artifact" in refusal.compiling(source, "--force", out="notes")
    assert "holds files but no artifact" in refusal.compiling(model, "--force", out="model")
    (tmp_path / "file").touch()
    assert "is not a directory" in refusal.compiling(source, "--force", out="file")


def test_the_outputs_parent_is_missing(source, refusal):
    assert "is not a directory; create it first" in refusal.compiling(source, out="no/where")


def test_an_output_inside_the_model_directory_is_only_a_directory(model, quick, refusal, capsys):
    out = model / "compiled"
    assert compile_cli.main([str(model), "-o", str(out), "--block-size", "16", "--quiet"]) == 0
    assert generate_cli.main([str(out), "--prompt-ids", "5", *GREEDY]) == 0


@pytest.mark.parametrize("mode", ["reference", "pack"])
@pytest.mark.parametrize("failing", [1, 20, 60])
def test_a_full_disk(source, quick, refusal, monkeypatch, mode, failing):
    write, calls = Path.write_bytes, iter(range(1000))

    def until_full(self: Path, data: bytes) -> int:
        if next(calls) == failing:
            write(self, data[: len(data) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(self, data)

    monkeypatch.setattr(Path, "write_bytes", until_full)
    options = ("--weights", mode, "--block-size", "16")
    message = refusal.compiling(source, *options)
    assert "cannot write" in message
    assert "No space left on device" in message


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small file system needs more rights")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_disk_too_small_for_the_weights(source, quick, refusal, small_disk):
    message = refusal.compiling(source, "--weights", "pack", "--block-size", "16", out="disk/out")
    assert "No space left on device" in message
    assert list(small_disk.iterdir()) == []


def in_child(work: Callable[[], object]) -> int:
    """Run ``work`` in a forked process; the number of the signal that ended it, or 0."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(600)  # never outlives a parent that failed
        try:
            work()
        finally:
            os._exit(0)
    return -os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize("mode", quick_first(["reference", "pack"]))
def test_killed_while_writing_and_compiled_again(source, quick, tmp_path, monkeypatch, mode):
    """SIGKILL at each kind of moment: a first file, in between, at the last flush, after it."""
    out = tmp_path / "out"
    command = [str(source), "-o", str(out), "--weights", mode, "--block-size", "16", "--quiet"]
    sync, done = os.fsync, []
    monkeypatch.setattr(os, "fsync", lambda fd: (done.append(fd), sync(fd)))
    assert compile_cli.main(command) == 0
    shutil.rmtree(out)
    total = len(done)
    for moment in (1, 3, total // 2, total - 1, total):

        def work(moment: int = moment) -> None:
            left = iter(range(moment - 1))
            monkeypatch.setattr(
                os, "fsync", lambda fd: sync(fd) if next(left, None) is not None else die()
            )
            compile_cli.main(command)

        assert in_child(work) == signal.SIGKILL
        # the last flush is that of the parent directory: by then the artifact is whole
        assert out.exists() == (moment == total)
    assert compile_cli.main([*command, "--force"]) == 0
    assert sorted(tmp_path.iterdir()) == [out]
    assert generate_cli.main([str(out), "--prompt-ids", "5", *GREEDY]) == 0


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def run_module(name: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", f"dsa_compile.cli.{name}", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.slow
def test_the_commands_as_processes(source, compiled, tmp_path):
    """Exit status and both streams as a script sees them, from importing torch to the end."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text('{"model_type": "llama"}')
    refused = run_module("compile", tmp_path / "model", "-o", tmp_path / "out")
    assert refused.returncode == 2
    assert refused.stderr.startswith("dsa-compile: error: config.json: model_type='llama'")
    assert refused.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()
    refused = run_module("generate", tmp_path / "model", "--prompt-ids", "1")
    assert refused.returncode == 2
    assert refused.stdout == ""
    assert refused.stderr.count("\n") == 1
    assert refused.stderr.startswith("dsa-generate: error: config.json: model_type='llama'")


@pytest.mark.slow
def test_a_process_killed_from_outside(source, tmp_path):
    """While it exports the model; whatever it left is gone after the next run."""
    out = tmp_path / "out"
    command = [sys.executable, "-m", "dsa_compile.cli.compile", source, "-o", out, "--quiet"]
    process = subprocess.Popen(command)
    try:
        while not list(tmp_path.glob(".out.tmp-*")):
            assert process.poll() is None
            time.sleep(0.01)
    finally:
        process.kill()
        process.wait()
    assert not out.exists()
    [left] = tmp_path.iterdir()
    assert compile_cli.main([str(tmp_path / "absent"), "-o", str(out)]) == 2
    assert not left.exists()
