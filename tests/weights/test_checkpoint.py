"""Every layout gives the reference model's parameters, bit for bit."""

import hashlib
import os
import shutil

import pytest
import torch

from dsa_compile.errors import CheckpointError
from dsa_compile.weights import stored
from dsa_compile.weights.checkpoint import Checkpoint
from examples.small_models.models import (
    dequantised_twin,
    save_hf,
    save_hub,
    tiny_config,
    tiny_model,
)


def read(checkpoint, name, dtype=torch.float32):
    out = torch.full(checkpoint.shape(name), 7.0, dtype=dtype)
    checkpoint.read_into(name, out)
    return out


def assert_same(checkpoint, state, dtype=torch.float32):
    for name, tensor in state.items():
        assert torch.equal(read(checkpoint, name, dtype), tensor.to(dtype)), name


@pytest.mark.parametrize("layout", ["hf_dir", "fused_dir"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plain_layouts(layout, dtype, model, request, open_checkpoint):
    checkpoint = open_checkpoint(request.getfixturevalue(layout))
    assert_same(checkpoint, model.state_dict(), dtype)


@pytest.mark.parametrize("slab", [1, 70_000, 8 << 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_hub_layout(dtype, slab, model, hub_dir, open_checkpoint, monkeypatch):
    """One block, a few, and all at once: the slab's size changes nothing."""
    monkeypatch.setattr(stored, "_SLAB", slab)
    checkpoint = open_checkpoint(hub_dir)
    assert_same(checkpoint, dequantised_twin(model).state_dict(), dtype)


def test_fp8_grid_rounds_up(hub_dir, open_checkpoint):
    """The tests above cover edges only while some matrix ends inside a block, both ways."""
    checkpoint = open_checkpoint(hub_dir)
    name = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"
    assert checkpoint.shape(name) == (576, 200)
    assert checkpoint.stored_dtype(name) == torch.float8_e4m3fn
    assert checkpoint.stored_dtype("model.layers.1.mlp.experts.down_proj") == torch.float8_e4m3fn
    assert checkpoint.stored_dtype("model.norm.weight") == torch.bfloat16


def test_bf16_hub_layout(model, tmp_path, open_checkpoint):
    save_hub(model, tmp_path, fp8=False, shards=2)
    assert_same(open_checkpoint(tmp_path), dequantised_twin(model, fp8=False).state_dict())


def test_bf16_save_pretrained(tmp_path, open_checkpoint):
    model = tiny_model(tiny_config(3), dtype=torch.bfloat16)
    save_hf(model, tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    assert_same(checkpoint, model.state_dict())
    kept = "model.layers.0.self_attn.indexer.weights_proj.weight"
    assert checkpoint.stored_dtype(kept) == torch.float32


def test_routers_that_a_recipe_rounds(hf_dir, tmp_path, open_checkpoint):
    (note,) = open_checkpoint(hf_dir).rounded_routers(torch.bfloat16)
    assert note.startswith("2 router matrices are stored in fp32 and rounded by this recipe")
    assert open_checkpoint(hf_dir).rounded_routers(torch.float32) == ()
    save_hf(tiny_model(tiny_config(3), dtype=torch.bfloat16).float(), tmp_path)  # of bf16 values
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.stored_dtype("model.layers.2.mlp.gate.weight") == torch.float32
    assert checkpoint.rounded_routers(torch.bfloat16) == ()


@pytest.mark.parametrize("layout", ["hub_dir", "hf_dir", "fused_dir"])
def test_any_strides(layout, request, open_checkpoint):
    checkpoint = open_checkpoint(request.getfixturevalue(layout))
    for name in ("model.layers.1.mlp.experts.gate_up_proj", "model.layers.0.mlp.up_proj.weight"):
        shape = checkpoint.shape(name)
        strided = torch.empty(*shape[:-2], shape[-1], shape[-2]).transpose(-1, -2)
        checkpoint.read_into(name, strided)
        assert torch.equal(strided, read(checkpoint, name))


def test_layers_left_out_need_no_files(model, tmp_path, hf_dir, open_checkpoint):
    whole = open_checkpoint(hf_dir)
    first = open_checkpoint(hf_dir, [0])
    names = {file.name for file in first.files}
    assert names < {file.name for file in whole.files}
    for path in hf_dir.iterdir():
        if path.suffix != ".safetensors" or path.name in names:
            shutil.copy(path, tmp_path)
    checkpoint = open_checkpoint(tmp_path, [0])
    state = model.state_dict()
    assert_same(checkpoint, {n: t for n, t in state.items() if ".layers." not in n})
    assert_same(checkpoint, {n: t for n, t in state.items() if ".layers.0." in n})
    with pytest.raises(CheckpointError, match=r"layers\.1\.input_layernorm"):
        checkpoint.shape("model.layers.1.input_layernorm.weight")


def test_single_file_wins_over_an_index(model, hf_dir, tmp_path, open_checkpoint):
    shutil.copytree(hf_dir, tmp_path, dirs_exist_ok=True)
    other = tiny_model(model.config, seed=5)
    save_hf(other, tmp_path / "other")
    shutil.move(tmp_path / "other" / "model.safetensors", tmp_path)
    assert_same(open_checkpoint(tmp_path), other.state_dict())


def test_file_facts_and_hashes(hub_dir, open_checkpoint):
    checkpoint = open_checkpoint(hub_dir)
    assert [file.name for file in checkpoint.files] == sorted(f.name for f in hub_dir.glob("*.s*s"))
    done = []
    hashes = checkpoint.hash_files(done.append)
    assert sum(done) == sum(file.size for file in checkpoint.files)
    for file in checkpoint.files:
        content = (hub_dir / file.name).read_bytes()
        assert file.size == len(content)
        assert hashes[file.name] == hashlib.sha256(content).hexdigest()
        length = int.from_bytes(content[:8], "little")
        assert file.header_sha256 == hashlib.sha256(content[8 : 8 + length]).hexdigest()


def test_hub_cache_links(model, hub_dir, tmp_path, open_checkpoint):
    """In a hub cache the files are links to blobs named by hash, which is then not computed."""
    snapshot, blobs = tmp_path / "snapshots" / "abc", tmp_path / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    names = {}
    for number, path in enumerate(sorted(hub_dir.iterdir())):
        blob = blobs / (f"{number:064x}" if path.suffix == ".safetensors" else f"{number:040x}")
        shutil.copy(path, blob)
        os.symlink(os.path.relpath(blob, snapshot), snapshot / path.name)
        names[path.name] = blob.name
    checkpoint = open_checkpoint(snapshot)
    assert_same(checkpoint, dequantised_twin(model).state_dict())
    assert checkpoint.hash_files() == {f.name: names[f.name] for f in checkpoint.files}


def test_truncated_while_in_use(hub_dir, tmp_path, open_checkpoint):
    shutil.copytree(hub_dir, tmp_path, dirs_exist_ok=True)
    checkpoint = open_checkpoint(tmp_path)
    for file in checkpoint.files:
        os.truncate(tmp_path / file.name, 8)
    with pytest.raises(CheckpointError, match=r"model-0000.*truncated while reading 'lm_head"):
        read(checkpoint, "lm_head.weight")
    for file in checkpoint.files:
        (tmp_path / file.name).unlink()
    with pytest.raises(CheckpointError, match=r"model-0000.*cannot be read \(No such file"):
        read(checkpoint, "lm_head.weight")


def test_read_into_checks_the_shape(hub_dir, open_checkpoint):
    checkpoint: Checkpoint = open_checkpoint(hub_dir)
    with pytest.raises(AssertionError, match="lm_head"):
        checkpoint.read_into("lm_head.weight", torch.empty(512, 100))
