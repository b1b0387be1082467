"""Only regular files are opened, and no more of them is read than a limit."""

import os
from pathlib import Path

import pytest

from dsa_compile.artifact import Artifact
from dsa_compile.common.regular_files import open_regular, read_regular, write_whole
from dsa_compile.errors import ArtifactError, CheckpointError, ConfigError, UserError, shown
from dsa_compile.frontend.config_json import read_config_json
from dsa_compile.inspect.measured import bench_cases
from dsa_compile.ir.stream_profile import Profile
from dsa_compile.weights.hashing import hash_files
from dsa_compile.weights.safetensors_file import SafetensorsFile
from dsa_compile.weights.shard_index import read_shard_index


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    os.mkfifo(tmp_path / "pipe")
    return tmp_path / "pipe"


def test_a_file_is_read_whole(tmp_path):
    (tmp_path / "file").write_bytes(b"x" * 100)
    (tmp_path / "link").symlink_to("file")
    assert read_regular(tmp_path / "link", 100) == b"x" * 100
    with pytest.raises(OSError, match="larger than"):
        read_regular(tmp_path / "file", 99)


@pytest.mark.parametrize("path", ["pipe", ".", "/dev/zero", "a\0b", "missing"])
def test_what_is_no_regular_file(pipe, path):
    with pytest.raises(OSError):  # noqa: PT011 - each its own
        open_regular(pipe.parent / path)


def test_pipes_where_files_should_be(pipe, tmp_path):
    """Each of these waited for ever for somebody to write into the pipe."""
    for name in ("config.json", "model.safetensors.index.json"):
        (tmp_path / name).symlink_to(pipe)
    with pytest.raises(ConfigError, match="not a regular file"):
        read_config_json(tmp_path)
    with pytest.raises(CheckpointError, match="not a regular file"):
        read_shard_index(tmp_path)
    with pytest.raises(CheckpointError, match="not a regular file"):
        SafetensorsFile.open(pipe, CheckpointError)
    with pytest.raises(CheckpointError, match="not a regular file"):
        hash_files([pipe], CheckpointError)
    with pytest.raises(UserError, match="not a regular file"):
        Profile.load(pipe, "sm_90a")
    with pytest.raises(UserError, match="not a regular file"):
        bench_cases(pipe)


def test_a_manifest_of_a_gigabyte(tmp_path):
    with (tmp_path / "manifest.json").open("wb") as file:
        file.truncate(1 << 30)
    with pytest.raises(ArtifactError, match="larger than 64 MiB"):
        Artifact.open(tmp_path)


@pytest.mark.parametrize("text", ["[" * 20_000, "1" * 400, '{"calls": {"x": 1e999}}'])
def test_measurements_that_no_parser_takes(tmp_path, text):
    (tmp_path / "file").write_text(text)
    with pytest.raises(UserError):
        bench_cases(tmp_path / "file")
    with pytest.raises(UserError):
        Profile.load(tmp_path / "file", "sm_90a")


def test_messages_repeat_a_little_of_the_input():
    assert shown("x" * 10**6).startswith("'xxx")
    assert len(shown("x" * 10**6)) <= 200
    assert len(shown(list(range(10**6)))) <= 200
    assert len(shown({"a": ["b" * 10**6] * 1000})) <= 200
    assert shown(10**5000) == "<int>"
    message = str(UserError("begin " + "x" * 10**6 + " end"))
    assert len(message) == 2000
    assert message.startswith("begin")
    assert message.endswith("end")


def test_two_processes_may_replace_a_file_at_once(tmp_path, monkeypatch):
    """The other one writes between the writing and the renaming of this one."""
    path, replace = tmp_path / "file", Path.replace

    def late(scratch: Path, target: Path) -> Path:
        monkeypatch.undo()
        write_whole(path, "theirs")
        return replace(scratch, target)

    monkeypatch.setattr(Path, "replace", late)
    write_whole(path, "ours")
    assert path.read_text() == "ours"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_cannot_be_replaced_leaves_nothing(tmp_path):
    (tmp_path / "file").mkdir()
    with pytest.raises(OSError, match="directory"):
        write_whole(tmp_path / "file", "text")
    assert [each.name for each in tmp_path.iterdir()] == ["file"]
