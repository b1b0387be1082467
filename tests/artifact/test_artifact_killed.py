"""SIGKILL at any moment leaves the old artifact, the new one, or nothing; the next run works."""

import fcntl
import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest

from dsa_compile.artifact import Artifact, ArtifactWriter, atomic_directory
from dsa_compile.artifact.atomic_directory import check_free
from dsa_compile.errors import ArtifactError
from tests.artifact.building import build


def leftovers(out: Path) -> list[Path]:
    return sorted(out.parent.glob(f".{out.name}.*"))


def in_child(work: Callable[[], object]) -> int:
    """Run ``work`` in a forked process; returns its number."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(600)  # never outlives a parent that failed
        try:
            work()
        finally:
            os._exit(0)
    return pid


def end_of(pid: int) -> int:
    """Wait for a child; the number of the signal that ended it, or 0."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) * -1


def note_of(out: Path) -> str:
    return Artifact.open(out).read_bytes("passes/00_noop/after.py").decode().strip()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def at_call(number: int, do: Callable[[], object]) -> None:
    """Do something when Python's functions and C's have been called and left that often."""
    count = iter(range(number))

    def hook(frame: FrameType, event: str, argument: object) -> None:
        if next(count, None) is None:
            sys.setprofile(None)
            do()

    sys.setprofile(hook)


def calls_of(work: Callable[[], object]) -> int:
    """Number of profiler events until the work is done."""
    count = itertools.count()
    sys.setprofile(lambda *event: next(count))
    try:
        work()
    finally:
        sys.setprofile(None)
    return next(count)


def test_killed_at_random_moments(tmp_path: Path, model_dir: Path) -> None:
    out = tmp_path / "artifact"
    build(out, model_dir, note="0")
    calls = calls_of(lambda: build(out, model_dir, note="0", force=True))
    chance = random.Random(0)
    last = 0
    kills = 0
    for number in range(1, 26):
        moment = chance.randrange(calls * 5 // 4)  # some builds end before

        def work(number: int = number, moment: int = moment) -> None:
            at_call(moment, die)
            build(out, model_dir, note=str(number), force=True)

        kills += end_of(in_child(work)) == signal.SIGKILL
        if out.exists():
            found = int(note_of(out).removeprefix("# after"))
            assert found in (last, number)
            last = found
    assert 5 < kills < 25
    build(out, model_dir, note="end", force=True)
    assert note_of(out) == "# after end"
    assert leftovers(out) == []


def killed_at_rename(out: Path, model_dir: Path, renames: int, force: bool) -> None:
    """Build in a child that dies when it has renamed that often and is about to do so again."""

    def work() -> None:
        rename, done = Path.rename, iter(range(10))

        def counted(self: Path, target: Path) -> Path:
            if next(done) == renames:
                die()
            return rename(self, target)

        Path.rename = counted  # type: ignore[method-assign]
        shutil.rmtree = lambda *args, **kwargs: die()  # type: ignore[assignment]
        build(out, model_dir, note="new", force=force)

    assert end_of(in_child(work)) == signal.SIGKILL


def test_killed_before_the_first_artifact_is_in_place(tmp_path: Path, model_dir: Path) -> None:
    out = tmp_path / "artifact"
    killed_at_rename(out, model_dir, 0, force=False)
    assert not out.exists()
    [staged] = leftovers(out)
    assert (staged / "manifest.json").exists()
    build(out, model_dir)
    Artifact.open(out)
    assert leftovers(out) == []


def test_killed_before_the_old_artifact_moves(tmp_path: Path, model_dir: Path) -> None:
    out = tmp_path / "artifact"
    build(out, model_dir, note="old")
    killed_at_rename(out, model_dir, 0, force=True)
    assert note_of(out) == "# after old"


def test_killed_between_the_two_renames_the_old_artifact_comes_back(
    tmp_path: Path, model_dir: Path
) -> None:
    out = tmp_path / "artifact"
    build(out, model_dir, note="old")
    killed_at_rename(out, model_dir, 1, force=True)
    assert not out.exists()
    assert len(leftovers(out)) == 2
    with pytest.raises(ArtifactError, match="exists already"):
        build(out, model_dir, note="later")
    assert note_of(out) == "# after old"
    assert leftovers(out) == []
    build(out, model_dir, note="later", force=True)
    assert note_of(out) == "# after later"


def test_killed_before_the_old_artifact_is_deleted(tmp_path: Path, model_dir: Path) -> None:
    out = tmp_path / "artifact"
    build(out, model_dir, note="old")
    killed_at_rename(out, model_dir, 2, force=True)
    assert note_of(out) == "# after new"
    assert len(leftovers(out)) == 1
    build(out, model_dir, note="later", force=True)
    assert leftovers(out) == []


def test_killed_while_a_slow_file_is_written(tmp_path: Path, model_dir: Path) -> None:
    out = tmp_path / "artifact"
    ready, tell = os.pipe()

    def work() -> None:
        def slow(writer: ArtifactWriter) -> None:
            with (writer.add_dir("weights") / "layer.safetensors").open("wb") as file:
                while True:
                    file.write(b"x" * 4096)
                    file.flush()
                    os.write(tell, b".")
                    time.sleep(0.001)

        build(out, model_dir, before_commit=slow)

    pid = in_child(work)
    os.read(ready, 1)
    # while it lives, another compilation to the same place neither harms it nor is harmed
    build(out, model_dir, note="other")
    [staged] = leftovers(out)
    assert (staged / "weights/layer.safetensors").exists()
    os.kill(pid, signal.SIGKILL)
    assert end_of(pid) == signal.SIGKILL
    assert note_of(out) == "# after other"
    assert leftovers(out) == [staged]
    build(out, model_dir, force=True)
    assert leftovers(out) == []
    os.close(ready)
    os.close(tell)


def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_only_leftovers_of_this_output_by_dead_processes_are_removed(
    tmp_path: Path, model_dir: Path
) -> None:
    out = tmp_path / "artifact"
    dead = dead_pid()
    stale = tmp_path / f".artifact.tmp-{dead}-00000000"
    kept = [
        tmp_path / f".artifact.tmp-{os.getppid()}-00000000",  # its process lives
        tmp_path / f".artifact2.tmp-{dead}-00000000",  # another output's
        tmp_path / f".artifact.tmp-{dead}-xyz",  # not of our making
        tmp_path / f"xartifact.tmp-{dead}-00000000",
    ]
    for path in (stale, *kept):
        path.mkdir()
    link = tmp_path / f".artifact.tmp-{dead}-11111111"
    link.symlink_to(model_dir)
    build(out, model_dir)
    assert not stale.exists()
    assert all(path.exists() for path in (*kept, link))
    assert (model_dir / "tokenizer.json").exists()


def test_what_another_user_left_is_neither_taken_nor_removed(
    tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted = [tmp_path / f".artifact.{role}-{dead_pid()}-00000000" for role in ("tmp", "old")]
    for path in planted:
        path.mkdir()
    another = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: another)
    check_free(tmp_path / "artifact", force=False)
    assert all(path.exists() for path in planted)
    assert not (tmp_path / "artifact").exists()


@pytest.mark.parametrize("role", ["tmp", "old"])
def test_two_processes_may_remove_the_same_leftovers(
    tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch, role: str
) -> None:
    """The other one does so just before this one opens what it has found."""
    stale = tmp_path / f".artifact.{role}-{dead_pid()}-00000000"
    stale.mkdir()
    is_locked = atomic_directory._is_locked

    def late(path: Path) -> bool:
        path.rmdir()
        return is_locked(path)

    monkeypatch.setattr(atomic_directory, "_is_locked", late)
    build(tmp_path / "artifact", model_dir)
    assert leftovers(tmp_path / "artifact") == []


def test_a_locked_directory_is_in_use_whatever_its_number(tmp_path: Path, model_dir: Path) -> None:
    # as seen from another container, the number of a living process may look dead
    busy = tmp_path / f".artifact.tmp-{dead_pid()}-00000000"
    busy.mkdir()
    descriptor = os.open(busy, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    build(tmp_path / "artifact", model_dir)
    assert busy.exists()
    os.close(descriptor)
    build(tmp_path / "artifact", model_dir, force=True)
    assert not busy.exists()
