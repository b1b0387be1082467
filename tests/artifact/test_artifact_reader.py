import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dsa_compile.artifact import Artifact
from dsa_compile.artifact.manifest import read_manifest
from dsa_compile.errors import ArtifactError, UserError
from dsa_compile.facts.config import CompileConfig
from dsa_compile.ir.graph_json import region_to_json
from dsa_compile.ir.naming import with_readable_names
from dsa_compile.ir.printer import region_to_python
from tests.artifact.building import (
    SPEC,
    build,
    forge,
    refuses,
    region,
    save_model,
)


def flip(path: Path, position: int = -1) -> None:
    """Change one byte, keeping the size."""
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def test_what_was_written_is_read(tmp_path: Path, model_dir: Path) -> None:
    written = build(tmp_path / "artifact", model_dir)
    artifact = Artifact.open(tmp_path / "artifact")
    assert artifact.manifest == written
    assert artifact.manifest.compile == CompileConfig()
    assert artifact.manifest.model.spec == SPEC
    assert artifact.manifest.dtype == "float32"
    assert artifact.manifest.layers[1].vars == {"layer": "model.layers.1"}
    for name in ("dense", "moe.long", "moe.short"):
        stored = with_readable_names(region(name))
        assert region_to_json(artifact.region(name)) == region_to_json(stored)
        text = artifact.read_bytes(f"graphs/{name}.py").decode()
        assert text == region_to_python(stored)
    assert artifact.read_json("weights/plan.json") == {"dense": {"norm": [1.5, None]}}
    tokenizer = artifact.tokenizer_bytes("tokenizer.json")
    assert tokenizer is not None
    assert json.loads(tokenizer) == {"é": 1}
    assert artifact.tokenizer_bytes("chat_template.jinja") is None
    assert artifact.model_dir() == model_dir


def test_the_digest_tells_artifacts_apart(tmp_path: Path, model_dir: Path) -> None:
    digests = [
        build(tmp_path / name, model_dir, note=note).digest
        for name, note in (("a", ""), ("b", ""), ("c", "other"))
    ]
    assert digests[0] == digests[1] != digests[2]


def test_a_digest_admits_one_artifact(tmp_path: Path, model_dir: Path) -> None:
    mine, other = (build(tmp_path / note, model_dir, note=note).digest for note in ("a", "b"))
    assert Artifact.open(tmp_path / "a", digest=mine).manifest.digest == mine
    with pytest.raises(ArtifactError, match=rf"its digest is {other}, and {mine} was wanted"):
        Artifact.open(tmp_path / "b", digest=mine)
    for no_digest in ("", mine[:-1], mine.upper() + "x", mine + "\n"):
        with pytest.raises(UserError, match="must be 64 hexadecimal digits"):
            Artifact.open(tmp_path / "a", digest=no_digest)
    # what was pinned cannot be edited into something else, however careful the forger
    forge(tmp_path / "a", "weights/plan.json", b"{}")
    with pytest.raises(ArtifactError, match="its digest is"):
        Artifact.open(tmp_path / "a", digest=mine)


FILES = [
    "graphs/dense.json",
    "graphs/moe.short.py",
    "passes/00_noop/after.py",
    "tokenizer/tokenizer.json",
    "weights/layer_0.safetensors",
    "weights/plan.json",
]


@pytest.mark.parametrize("name", FILES)
def test_any_edited_or_missing_file_is_refused_by_name(packed_dir: Path, name: str) -> None:
    path = packed_dir / name
    flip(path)
    refuses(packed_dir, f"{name}: not the content that was compiled")
    path.write_bytes(path.read_bytes()[:-1])
    refuses(packed_dir, rf"{name}: \d+ bytes, \d+ when compiled")
    path.unlink()
    refuses(packed_dir, f"{name}: missing")
    path.mkdir()
    refuses(packed_dir, f"{name}: missing, or not a file")


def test_any_edit_of_the_manifest_is_refused(artifact_dir: Path) -> None:
    manifest = artifact_dir / "manifest.json"
    content = manifest.read_bytes()
    for position in range(0, len(content), 41):
        flip(manifest, position)
        changed = manifest.read_bytes()
        manifest.write_bytes(content)
        with pytest.raises(ArtifactError):
            read_manifest(changed, "manifest.json")
    for end in (0, 1, len(content) // 2):
        manifest.write_bytes(content[:end])
        refuses(artifact_dir, "manifest.json: not valid JSON")


def test_header_mode_skips_the_data_of_weights_only(packed_dir: Path) -> None:
    weights = packed_dir / "weights/layer_0.safetensors"
    flip(weights)
    assert Artifact.open(packed_dir, "header").verify == "header"
    refuses(packed_dir, "layer_0.safetensors: not the content")
    flip(weights)
    content = weights.read_bytes()
    assert b'"norm"' in content
    weights.write_bytes(content.replace(b'"norm"', b'"nora"'))
    refuses(packed_dir, "layer_0.safetensors: not the content", "header")
    weights.write_bytes(content + b"\0")
    refuses(packed_dir, "layer_0.safetensors: 1", "header")
    weights.write_bytes(content)
    flip(packed_dir / "graphs/dense.json")
    refuses(packed_dir, "graphs/dense.json", "header")


def test_weights_hashed_in_the_background_are_compared_in_the_end(
    packed_dir: Path, artifact_dir: Path, model_dir: Path
) -> None:
    assert Artifact.open(packed_dir, later=True).settle()
    assert not Artifact.open(packed_dir, "header", later=True).settle(), "no content is hashed"
    flip(packed_dir / "weights/layer_0.safetensors")
    artifact = Artifact.open(packed_dir, later=True)
    with pytest.raises(ArtifactError, match=r"layer_0.safetensors: not the content"):
        artifact.settle()
    assert not artifact.settle()
    Artifact.open(packed_dir, later=True).abandon()
    (weights,) = model_dir.glob("*.safetensors")
    flip(weights)
    artifact = Artifact.open(artifact_dir, later=True)
    assert artifact.model_dir() == model_dir
    with pytest.raises(ArtifactError, match=f"{weights.name}: not the content"):
        artifact.settle()


@pytest.mark.parametrize(
    "name",
    ["graphs/extra.json", "weights/a/b.bin", "graphs/.hidden", "tokenizer/added.json"],
)
def test_files_added_where_files_are_loaded_from_are_refused(artifact_dir: Path, name: str) -> None:
    extra = artifact_dir / name
    extra.parent.mkdir(exist_ok=True)
    extra.write_text("{}")
    refuses(artifact_dir, f"{name}: not part of the artifact")


def test_clutter_elsewhere_does_no_harm(artifact_dir: Path) -> None:
    (artifact_dir / "NOTES.txt").write_text("mine")
    Artifact.open(artifact_dir)


def test_links_out_of_the_artifact_are_refused(artifact_dir: Path, tmp_path: Path) -> None:
    graph = artifact_dir / "graphs/dense.json"
    shutil.move(graph, tmp_path / "elsewhere.json")
    graph.symlink_to(tmp_path / "elsewhere.json")
    refuses(artifact_dir, "graphs/dense.json: missing, or not a file inside")
    graph.unlink()
    graph.symlink_to(graph)
    refuses(artifact_dir, "graphs/dense.json: missing")
    graph.unlink()
    (artifact_dir / "kept.json").write_bytes((tmp_path / "elsewhere.json").read_bytes())
    graph.symlink_to(artifact_dir / "kept.json")
    Artifact.open(artifact_dir)
    shutil.move(artifact_dir / "graphs", tmp_path / "graphs")
    (artifact_dir / "graphs").symlink_to(tmp_path / "graphs")
    refuses(artifact_dir, "graphs/.*: missing, or not a file inside")


def test_a_forged_graph_reaches_no_op_outside_the_whitelist(artifact_dir: Path) -> None:
    graph = (artifact_dir / "graphs/dense.json").read_bytes()
    assert b"dsa.rms_norm.default" in graph
    forge(artifact_dir, "graphs/dense.json", graph.replace(b"dsa.rms_norm.default", b"os.system"))
    artifact = Artifact.open(artifact_dir)
    with pytest.raises(ArtifactError, match=r"graph dense, node rms_norm: 'os.system'"):
        artifact.region("dense")


def test_a_graph_under_another_name_is_refused(artifact_dir: Path) -> None:
    forge(artifact_dir, "graphs/dense.json", (artifact_dir / "graphs/moe.long.json").read_bytes())
    with pytest.raises(ArtifactError, match=r"dense.json: holds region 'moe.long'"):
        Artifact.open(artifact_dir).region("dense")


def test_a_file_changed_after_opening_is_refused(artifact_dir: Path) -> None:
    artifact = Artifact.open(artifact_dir)
    flip(artifact_dir / "graphs/dense.json")
    with pytest.raises(ArtifactError, match=r"dense.json: not the content"):
        artifact.region("dense")


def test_what_is_not_there_is_said(artifact_dir: Path, tmp_path: Path) -> None:
    artifact = Artifact.open(artifact_dir)
    with pytest.raises(ArtifactError, match="has no region 'mtp', only dense"):
        artifact.region("mtp")
    with pytest.raises(ArtifactError, match=r"has no file '../x'"):
        artifact.read_bytes("../x")
    with pytest.raises(UserError, match="unknown verify 'none'"):
        Artifact.open(artifact_dir, "none")
    refuses(tmp_path / "nowhere", "no such directory")
    refuses(tmp_path / "model", "manifest.json: missing")
    os.mkfifo(tmp_path / "model/manifest.json")
    refuses(tmp_path / "model", "manifest.json: missing")


def test_model_files_must_be_those_compiled(artifact_dir: Path, model_dir: Path) -> None:
    weights = model_dir / "model.safetensors"
    content = weights.read_bytes()
    flip(weights)
    artifact, quick = Artifact.open(artifact_dir), Artifact.open(artifact_dir, "header")
    quick.model_dir()
    with pytest.raises(ArtifactError, match=r"model.safetensors: not the content"):
        artifact.model_dir()
    weights.write_bytes(content[:-1])
    with pytest.raises(ArtifactError, match=r"model.safetensors: \d+ bytes"):
        quick.model_dir()
    weights.unlink()
    with pytest.raises(ArtifactError, match=r"model.safetensors: cannot be read"):
        quick.model_dir()


def test_a_moved_model_and_a_download_cache_are_found(artifact_dir: Path, tmp_path: Path) -> None:
    artifact = Artifact.open(artifact_dir)
    shutil.move(tmp_path / "model", tmp_path / "moved")
    with pytest.raises(ArtifactError, match=r"model: no such directory; .* takes its weights"):
        artifact.model_dir()
    assert artifact.model_dir(tmp_path / "moved") == tmp_path / "moved"
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for path in (tmp_path / "moved").iterdir():
        (snapshot / path.name).symlink_to(path)
    assert artifact.model_dir(snapshot) == snapshot


def test_artifacts_that_hold_or_lack_weights_refer_to_no_model(
    packed_dir: Path, tmp_path: Path
) -> None:
    with pytest.raises(ArtifactError, match=r"refers to no model directory \(weights: pack\)"):
        Artifact.open(packed_dir).model_dir()
    build(tmp_path / "bare", save_model(tmp_path / "model"), mode="none")
    assert Artifact.open(tmp_path / "bare").manifest.weights.files == ()


def test_reading_needs_no_compiler() -> None:
    code = (
        "import sys, dsa_compile.artifact\n"
        "heavy = ('transformers', 'sympy', 'torch._dynamo', 'dsa_compile.passes',"
        " 'dsa_compile.lowering', 'dsa_compile.frontend', 'dsa_compile.ir.dims')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_a_region_read_back_runs(artifact_dir: Path) -> None:
    graph = Artifact.open(artifact_dir).region("dense").graph
    (normed,) = torch.fx.GraphModule({}, graph)(torch.ones(2, 8), torch.full((8,), 3.0))
    torch.testing.assert_close(normed, torch.full((2, 8), 3.0))


def test_full_verification_reads_links_into_a_hub_cache(tmp_path, model_dir):
    """The blob's name says what it should hold, and an attacker or a bad disk what it does."""
    weights = model_dir / "model.safetensors"
    content = weights.read_bytes()
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    blob = blobs / hashlib.sha256(content).hexdigest()
    blob.write_bytes(content)
    weights.unlink()
    weights.symlink_to(blob)
    build(tmp_path / "artifact", model_dir)
    Artifact.open(tmp_path / "artifact").model_dir()
    blob.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    Artifact.open(tmp_path / "artifact", "header").model_dir()
    # to recompile would not help: the hash that an artifact keeps is the blob's name
    with pytest.raises(ArtifactError, match=f"compiled; delete {blob} and download the model aga"):
        Artifact.open(tmp_path / "artifact").model_dir()
