import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsa_compile.artifact import Artifact, ArtifactWriter
from dsa_compile.errors import ArtifactError
from tests.artifact.building import build, save_model


def beside(out: Path) -> list[str]:
    """Names of files next to ``out``, other than the model."""
    return sorted(p.name for p in out.parent.iterdir() if p.name not in (out.name, "model"))


def refuses(out: Path, model_dir: Path, message: str, force: bool = False) -> None:
    with pytest.raises(ArtifactError, match=message) as caught:
        build(out, model_dir, force=force)
    assert "\n" not in str(caught.value)
    assert str(out) in str(caught.value)
    assert beside(out) == []


def test_an_existing_output_is_refused_without_force(tmp_path: Path, model_dir: Path) -> None:
    out = tmp_path / "artifact"
    first = build(out, model_dir, note="first")
    refuses(out, model_dir, "exists already; use --force")
    assert Artifact.open(out).manifest == first


def test_force_replaces_an_artifact_whole(tmp_path: Path, model_dir: Path) -> None:
    out = tmp_path / "artifact"
    build(out, model_dir, note="first")
    (out / "graphs/dense.py").unlink()
    (out / "NOTES.txt").write_text("somebody's")
    refuses(out, model_dir, "NOTES.txt: not a file of the artifact", force=True)
    (out / "NOTES.txt").unlink()
    second = build(out, model_dir, note="second", force=True)
    assert Artifact.open(out).manifest == second
    assert (out / "graphs/dense.py").exists()
    assert beside(out) == []


def test_force_replaces_a_damaged_artifact_and_one_of_another_version(
    tmp_path: Path, model_dir: Path
) -> None:
    out = tmp_path / "artifact"
    build(out, model_dir)
    (out / "graphs/dense.json").unlink()
    text = (out / "manifest.json").read_text()
    (out / "manifest.json").write_text(
        text.replace('"format_version": 1', '"format_version": 9', 1)
    )
    build(out, model_dir, force=True)
    Artifact.open(out)


def test_force_takes_an_empty_directory_and_nothing_else(tmp_path: Path, model_dir: Path) -> None:
    out = tmp_path / "artifact"
    out.mkdir()
    build(out, model_dir, force=True)
    shutil.rmtree(out)

    out.mkdir()
    (out / "thesis.tex").write_text("years of work")
    refuses(out, model_dir, "holds files but no artifact", force=True)
    (out / "manifest.json").write_text('{"producer": {"name": "another"}}')
    refuses(out, model_dir, "holds files but no artifact", force=True)
    assert (out / "thesis.tex").read_text() == "years of work"
    shutil.rmtree(out)

    out.write_text("a file")
    refuses(out, model_dir, "is not a directory", force=True)
    out.unlink()

    target = tmp_path / "model/target"
    build(target, save_model(tmp_path / "model"))
    out.symlink_to(target)
    refuses(out, model_dir, "is not a directory", force=True)
    Artifact.open(target)


def test_an_output_that_appears_meanwhile_is_kept(tmp_path: Path, model_dir: Path) -> None:
    out = tmp_path / "artifact"

    def other_finishes_first(writer: ArtifactWriter) -> None:
        build(out, model_dir, note="other")

    with pytest.raises(ArtifactError, match="exists already"):
        build(out, model_dir, note="slow", before_commit=other_finishes_first)
    assert b"# after other" in Artifact.open(out).read_bytes("passes/00_noop/after.py")
    assert beside(out) == []


def test_the_parent_must_exist(tmp_path: Path, model_dir: Path) -> None:
    with pytest.raises(ArtifactError, match="missing is not a directory; create it first"):
        build(tmp_path / "missing/artifact", model_dir)


@pytest.mark.parametrize("error", [RuntimeError("bug"), KeyboardInterrupt()])
def test_any_failure_leaves_nothing(tmp_path: Path, model_dir: Path, error: BaseException) -> None:
    out = tmp_path / "artifact"

    def fail(writer: ArtifactWriter) -> None:
        raise error

    with pytest.raises(type(error)):
        build(out, model_dir, before_commit=fail)
    assert not out.exists()
    assert beside(out) == []


def test_a_failed_swap_puts_the_old_artifact_back(
    tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "artifact"
    first = build(out, model_dir, note="first")
    rename = Path.rename

    def fail_for_new(self: Path, target: Path) -> Path:
        if ".tmp-" in self.name:
            raise OSError(errno.EIO, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail_for_new)
    with pytest.raises(ArtifactError, match="Input/output error"):
        build(out, model_dir, force=True)
    assert Artifact.open(out).manifest == first
    assert beside(out) == []


def test_a_relative_output_is_where_it_was_asked_for(
    tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    build(Path("artifact"), model_dir, before_commit=lambda writer: os.chdir("/"))
    Artifact.open(tmp_path / "artifact")


def test_permissions_follow_the_users_mask(artifact_dir: Path) -> None:
    mask = os.umask(0o022)
    os.umask(mask)
    assert artifact_dir.stat().st_mode & 0o777 == 0o777 & ~mask


def test_packed_weights_are_not_hashed_again(tmp_path: Path, model_dir: Path) -> None:
    # the record given to add_packed ends up in the manifest as it is
    manifest = build(tmp_path / "artifact", model_dir, mode="pack")
    [weights] = manifest.weights.files
    record = next(f for f in manifest.files if f.path == "weights/layer_0.safetensors")
    assert (record.size, record.sha256) == (weights.size, weights.sha256)
    assert weights.header_sha256 is not None
    assert weights.header_sha256 != weights.sha256


def test_graph_files_hold_a_node_a_line(artifact_dir: Path) -> None:
    lines = (artifact_dir / "graphs/dense.json").read_text().splitlines()
    assert [line.partition('"name": ')[2].partition(",")[0] for line in lines[1:-1]] == [
        '"hidden"',
        '"norm"',
        '"rms_norm"',
        '"output"',
    ]


@pytest.mark.parametrize("failing", range(6))
def test_a_full_disk_is_reported_and_leaves_nothing(
    tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    out = tmp_path / "artifact"
    first = build(out, model_dir, note="first")
    write, calls = Path.write_bytes, iter(range(100))

    def write_until_full(self: Path, data: bytes) -> int:
        if next(calls) == failing:
            write(self, data[: len(data) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(self, data)

    monkeypatch.setattr(Path, "write_bytes", write_until_full)
    refuses(out, model_dir, "cannot write .*No space left on device", force=True)
    assert Artifact.open(out).manifest == first


def test_a_full_disk_met_by_the_caller_is_reported_too(tmp_path: Path, model_dir: Path) -> None:
    def fill(writer: ArtifactWriter) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(ArtifactError, match="No space left on device"):
        build(tmp_path / "artifact", model_dir, before_commit=fill)
    assert beside(tmp_path / "artifact") == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small file system needs more rights")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_disk_that_really_is_full(small_disk: Path, model_dir: Path) -> None:
    out = small_disk / "artifact"

    def fill(writer: ArtifactWriter) -> None:
        writer.add_text("passes/01_big/after.py", "x" * 100_000)

    with pytest.raises(ArtifactError, match=r"cannot write passes/01_big/after.py .No space left"):
        build(out, model_dir, before_commit=fill)
    assert list(small_disk.iterdir()) == []
    build(out, model_dir)
    Artifact.open(out)
