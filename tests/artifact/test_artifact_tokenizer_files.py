"""Which tokenizer files get into an artifact: none from elsewhere, none that is no such file."""

import os
from pathlib import Path

import pytest

from dsa_compile.artifact import Artifact
from dsa_compile.errors import ConfigError
from tests.artifact.building import build, save_model


def test_a_link_out_of_the_model_directory(tmp_path, model_dir):
    (tmp_path / "secret.json").write_text('{"password": 1}')
    (model_dir / "tokenizer_config.json").symlink_to("../secret.json")
    with pytest.raises(ConfigError, match="outside the model directory"):
        build(tmp_path / "artifact", model_dir)
    assert not (tmp_path / "artifact").exists()


def test_a_link_through_a_folder_called_blobs(tmp_path, model_dir):
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs/secret").write_text("{}")
    (model_dir / "tokenizer_config.json").symlink_to("../blobs/secret")
    with pytest.raises(ConfigError, match="outside the model directory"):
        build(tmp_path / "artifact", model_dir)


def test_links_inside_and_into_a_hub_cache(tmp_path):
    model = tmp_path / "models--x--y/snapshots/abc"
    model.parent.mkdir(parents=True)
    save_model(model)
    blobs = tmp_path / "models--x--y/blobs"
    blobs.mkdir()
    (blobs / "0123").write_text('{"chat_template": "x"}')
    (model / "tokenizer_config.json").symlink_to("../../blobs/0123")
    (model / "special_tokens_map.json").symlink_to("tokenizer.json")
    build(tmp_path / "artifact", model)
    artifact = Artifact.open(tmp_path / "artifact")
    assert artifact.tokenizer_bytes("tokenizer_config.json") == b'{"chat_template": "x"}'
    assert artifact.tokenizer_bytes("special_tokens_map.json") == '{"é": 1}'.encode()


@pytest.mark.parametrize(
    ("name", "data", "says"),
    [
        ("tokenizer.json", b"root:x:0:0:", "not valid JSON"),
        ("tokenizer.json", b"[]", "should hold a JSON object"),
        ("tokenizer.json", b"[" * 20_000, "not valid JSON"),
        ("generation_config.json", b"{", "not valid JSON"),
        ("chat_template.jinja", b"\xff\xfe", "not UTF-8 text"),
    ],
)
def test_what_is_no_tokenizer_file(tmp_path, model_dir, name, data, says):
    (model_dir / name).write_bytes(data)
    with pytest.raises(ConfigError, match=says):
        build(tmp_path / "artifact", model_dir)


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir, lambda path: path.symlink_to(path.name)])
def test_what_is_no_file(tmp_path, model_dir, make):
    (model_dir / "tokenizer.json").unlink()
    make(model_dir / "tokenizer.json")
    with pytest.raises(ConfigError, match=r"tokenizer\.json: "):
        build(tmp_path / "artifact", model_dir)
