"""Tokenizers of artifacts: made from checked bytes, and harmless to prompts."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from dsa_compile.artifact.reader import Artifact
from dsa_compile.errors import ArtifactError, RequestError
from dsa_compile.runtime.requests.prompts import load_tokenizer, token_ids_of
from examples.small_models.tokenizer import save_byte_tokenizer
from tests.artifact.building import build, edit_manifest, forge, save_model

NAME = "tokenizer/tokenizer.json"
TEXT = "hello world"


def built(folder: Path, edit: Callable[[Tokenizer], object] = lambda tokenizer: None) -> Path:
    """An artifact with an edited byte tokenizer."""
    model = save_model(folder / "model")
    save_byte_tokenizer(model)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    edit(tokenizer)
    tokenizer.save(str(model / "tokenizer.json"))
    build(folder / "artifact", model)
    return folder / "artifact"


def unlist(artifact: Path) -> None:
    def edit(data: dict[str, Any]) -> None:
        data["tokenizer"].remove(NAME)
        data["files"] = [file for file in data["files"] if file["path"] != NAME]

    edit_manifest(artifact, edit)


def test_a_tokenizer_encodes_and_decodes(tmp_path):
    tokenizer = load_tokenizer(Artifact.open(built(tmp_path)))
    ids = tokenizer.encode(TEXT).ids
    assert len(ids) == len(TEXT)
    assert tokenizer.decode(ids) == TEXT


def test_only_a_listed_tokenizer_inside_the_artifact_is_used(tmp_path):
    artifact = built(tmp_path)
    opened = Artifact.open(artifact)
    unlist(artifact)
    with pytest.raises(ArtifactError, match=rf"{NAME}: not part of the artifact"):
        Artifact.open(artifact)
    (artifact / NAME).rename(tmp_path / "elsewhere.json")
    assert load_tokenizer(Artifact.open(artifact)) is None
    # swapped after it was checked: for another file, for a link to its own content elsewhere
    (artifact / NAME).write_bytes(b"{}")
    with pytest.raises(ArtifactError, match=rf"{NAME}: not the content that was compiled"):
        load_tokenizer(opened)
    (artifact / NAME).unlink()
    (artifact / NAME).symlink_to(tmp_path / "elsewhere.json")
    with pytest.raises(ArtifactError, match=rf"{NAME}: missing, or not a file inside"):
        load_tokenizer(opened)
    (artifact / NAME).unlink()
    shutil.rmtree(artifact / "tokenizer")
    (tmp_path / "folder").mkdir()
    (tmp_path / "elsewhere.json").rename(tmp_path / "folder" / "tokenizer.json")
    (artifact / "tokenizer").symlink_to(tmp_path / "folder")
    with pytest.raises(ArtifactError, match=rf"{NAME}: missing, or not a file inside"):
        load_tokenizer(opened)


@pytest.mark.parametrize(
    "setting",
    [
        lambda tokenizer: tokenizer.enable_truncation(max_length=4),
        lambda tokenizer: tokenizer.enable_padding(length=40),
        lambda tokenizer: tokenizer.enable_padding(pad_to_multiple_of=8),
    ],
)
def test_saved_truncation_and_padding_leave_prompts_alone(tmp_path, setting):
    tokenizer = load_tokenizer(Artifact.open(built(tmp_path, setting)))
    ids = token_ids_of("r", TEXT, 258, tokenizer)
    assert tokenizer.decode(ids) == TEXT
    assert len(ids) == len(TEXT)


@pytest.mark.parametrize(
    "single",
    [
        [{"SpecialToken": {"id": "[CLS]", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        [{"Sequence": {"id": "B", "type_id": 0}}],
    ],
)
def test_a_tokenizer_that_panics_is_refused_on_loading(tmp_path, single):
    artifact = built(tmp_path)
    data = json.loads((artifact / NAME).read_text())
    pair = [{"Sequence": {"id": name, "type_id": 0}} for name in "AB"]
    data["post_processor"] = {
        "type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": {},
    }  # fmt: skip
    forge(artifact, NAME, json.dumps(data).encode())
    with pytest.raises(ArtifactError, match=rf"{NAME}: not a tokenizer \(.+\); mend") as caught:
        load_tokenizer(Artifact.open(artifact))
    assert "\n" not in str(caught.value)


def test_a_text_that_cannot_be_encoded_is_the_requests_error(tmp_path):
    tokenizer = load_tokenizer(Artifact.open(built(tmp_path)))
    with pytest.raises(RequestError, match="request 'r': the tokenizer cannot encode the text"):
        token_ids_of("r", "caf\udce9", 258, tokenizer)

    class Interrupted:
        def encode(self, text):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        token_ids_of("r", TEXT, 258, Interrupted())
