"""Packed weights: the same bytes as materialised ones, and any change is noticed."""

import hashlib
import os

import pytest
import torch
from safetensors.torch import load_file

from dsa_compile.errors import ArtifactError, CheckpointError
from dsa_compile.weights.pack import PackedFile, PackedWeights, write_packed
from dsa_compile.weights.plan import Concat, Constant, Load, WeightEntry, WeightPlan
from tests.weights.loading import load_layer

REGIONS = [
    ("embed", "embed", {}),
    ("layer-1", "moe", {"layer": "model.layers.1"}),
    ("layer-2", "moe", {"layer": "model.layers.2"}),
]


@pytest.fixture(scope="module")
def plan():
    made = WeightPlan()
    made.define(
        "embed", "inv_freq", WeightEntry("float32", (2,), Constant("float32", (2,), (1, 2)))
    )
    norm = Load("{layer}.input_layernorm.weight")
    made.define("moe", "norm", WeightEntry("bfloat16", (200,), norm))
    made.define("moe", "norms", WeightEntry("float32", (400,), Concat(0, (norm, norm))))
    bias = Load("{layer}.mlp.gate.e_score_correction_bias")
    made.define("moe", "bias", WeightEntry("float32", (8,), bias))
    experts = Load("{layer}.mlp.experts.down_proj")
    made.define("moe", "down", WeightEntry("bfloat16", (8, 200, 64), experts))
    return made


@pytest.fixture
def packed(plan, hub_dir, open_checkpoint, tmp_path):
    return write_packed(tmp_path, plan, REGIONS, open_checkpoint(hub_dir))


def test_same_weights_as_the_checkpoint(packed, plan, hub_dir, open_checkpoint, tmp_path):
    source, checkpoint = PackedWeights.open(tmp_path, packed, "full"), open_checkpoint(hub_dir)
    for stem, kind, variables in REGIONS:
        ours = load_layer(plan, kind, variables, source, stem=stem)
        wanted = load_layer(plan, kind, variables, checkpoint, stem=stem)
        peers = load_file(tmp_path / f"{stem}.safetensors")  # the format's own reader agrees
        assert ours.keys() == wanted.keys() == peers.keys()
        for key in wanted:
            assert torch.equal(ours[key], wanted[key]), key
            assert ours[key].dtype == wanted[key].dtype
            assert torch.equal(peers[key], wanted[key]), key
            assert torch.equal(source.read(stem, key), wanted[key])


def test_records(packed, plan, hub_dir, open_checkpoint, tmp_path):
    assert [file.name for file in packed] == [f"{stem}.safetensors" for stem, _, _ in REGIONS]
    for file in packed:
        content = (tmp_path / file.name).read_bytes()
        assert len(content) == file.size
        assert hashlib.sha256(content).hexdigest() == file.sha256
    done = []
    again = write_packed(tmp_path, plan, REGIONS, open_checkpoint(hub_dir), done.append)
    assert again == packed, "packing is deterministic"
    assert sum(done) == sum(file.size for file in packed)


def test_fill_any_strides(packed, plan, tmp_path):
    source = PackedWeights.open(tmp_path, packed)
    out = torch.empty(64, 200, 8, dtype=torch.bfloat16).permute(2, 1, 0)
    source.fill("layer-1", "down", plan.entries("moe")["down"], {}, out)
    assert torch.equal(out, source.read("layer-1", "down"))


def refused(tmp_path, packed, *fragments, verify="header"):
    with pytest.raises(ArtifactError) as error:
        PackedWeights.open(tmp_path, packed, verify)
    for fragment in ("safetensors", *fragments):
        assert fragment in str(error.value)
    assert "\n" not in str(error.value)


def test_missing_file(packed, tmp_path):
    (tmp_path / "layer-1.safetensors").unlink()
    refused(tmp_path, packed, "layer-1", "missing")


def test_truncated_file(packed, tmp_path):
    os.truncate(tmp_path / "layer-1.safetensors", packed[1].size - 1)
    refused(tmp_path, packed, "layer-1", f"the artifact says {packed[1].size}")


def test_edited_data_is_seen_by_full_verification(packed, tmp_path):
    with (tmp_path / "layer-2.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        byte = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([byte[0] ^ 1]))
    PackedWeights.open(tmp_path, packed, "header")
    refused(tmp_path, packed, "layer-2", "not what was compiled", verify="full")


def test_full_verification_reads_behind_links(packed, tmp_path):
    """A link named like a hub cache's blob proves nothing about an artifact's file."""
    path = tmp_path / "layer-2.safetensors"
    (tmp_path / "blobs").mkdir()
    blob = tmp_path / "blobs" / packed[2].sha256
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    blob.write_bytes(content)
    path.unlink()
    path.symlink_to(blob)
    refused(tmp_path, packed, "layer-2", "not what was compiled", verify="full")


def test_edited_header(packed, tmp_path):
    with (tmp_path / "layer-2.safetensors").open("r+b") as file:
        file.seek(8)
        file.write(b"!")
    refused(tmp_path, packed, "layer-2", "corrupt")


@pytest.mark.parametrize("name", ["../layer-1.safetensors", "/a.safetensors", "layer-1.bin", ""])
def test_names_that_leave_the_directory(packed, tmp_path, name):
    listed = PackedFile(name, packed[1].size, packed[1].sha256)
    with pytest.raises(ArtifactError, match="not a plain file name"):
        PackedWeights.open(tmp_path, [listed])


def test_weights_that_are_not_there(packed, plan, tmp_path):
    source = PackedWeights.open(tmp_path, packed)
    with pytest.raises(ArtifactError, match="no file for 'layer-9'"):
        source.read("layer-9", "norm")
    with pytest.raises(ArtifactError, match=r"layer-1\.safetensors: lacks the weight 'head'"):
        source.read("layer-1", "head")
    other = WeightEntry("float32", (200,), Load("x"))
    with pytest.raises(ArtifactError, match=r"'norm' is BF16 \[200\], the weight plan"):
        source.fill("layer-1", "norm", other, {}, torch.empty(200))


def test_disk_that_cannot_be_written(plan, hub_dir, open_checkpoint, tmp_path):
    with pytest.raises(ArtifactError, match=r"embed\.safetensors: cannot be written"):
        write_packed(tmp_path / "absent", plan, REGIONS, open_checkpoint(hub_dir))
    (tmp_path / "embed.safetensors").symlink_to("/dev/full")
    with pytest.raises(ArtifactError, match=r"cannot be written \(No space left"):
        write_packed(tmp_path, plan, REGIONS, open_checkpoint(hub_dir))


def test_unreadable_source(plan, hub_dir, open_checkpoint, tmp_path):
    checkpoint = open_checkpoint(hub_dir, [1])
    with pytest.raises(CheckpointError, match=r"no 'model\.layers\.2\.input"):
        write_packed(tmp_path, plan, REGIONS, checkpoint)
