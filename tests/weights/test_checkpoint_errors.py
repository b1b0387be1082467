"""A damaged or foreign checkpoint is refused from its headers, in one line that names the place."""

import json
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from dsa_compile.errors import CheckpointError
from dsa_compile.weights.dtypes import SAFETENSORS_DTYPES

INDEX = "model.safetensors.index.json"
KV_A = "model.layers.1.self_attn.kv_a_proj_with_mqa.weight"
EXPERT = "model.layers.2.mlp.experts.5.up_proj.weight"
NORM = "model.layers.0.input_layernorm.weight"


class Damage:
    """Edits one copy of a hub-layout directory; knows where each key lies."""

    def __init__(self, directory):
        self.directory = directory
        self.weight_map = json.loads((directory / INDEX).read_text())["weight_map"]

    def home(self, key):
        return self.directory / self.weight_map[key]

    def set(self, key, value):
        """Replace, add (into the first file) or, with None, drop a tensor; the index follows."""
        home = self.directory / self.weight_map.setdefault(key, min(self.weight_map.values()))
        content = load_file(home)
        content.pop(key, None)
        if value is None:
            del self.weight_map[key]
        else:
            content[key] = value.contiguous()
        save_file(content, home)
        self.write_index()

    def get(self, key):
        return load_file(self.home(key))[key]

    def write_index(self):
        (self.directory / INDEX).write_text(json.dumps({"weight_map": self.weight_map}))

    def edit_header(self, key, edit):
        content = self.home(key).read_bytes()
        length = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + length])
        edit(header)
        text = json.dumps(header).encode()
        data = len(text).to_bytes(8, "little") + text + content[8 + length :]
        self.home(key).write_bytes(data)


@pytest.fixture
def damage(hub_dir, tmp_path):
    shutil.copytree(hub_dir, tmp_path, dirs_exist_ok=True)
    return Damage(tmp_path)


def refused(directory, open_checkpoint, *fragments, layers=(0, 1, 2)):
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(directory, layers)
    message = str(error.value)
    assert "\n" not in message
    assert str(directory) in message
    for fragment in fragments:
        assert str(fragment) in message


def test_undamaged(damage, open_checkpoint):
    damage.set(NORM, damage.get(NORM))
    open_checkpoint(damage.directory)


def test_missing_shard(damage, open_checkpoint):
    home = damage.home(KV_A)
    home.unlink()
    refused(damage.directory, open_checkpoint, home.name, "missing; it should hold 'model.")


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_truncated_shard(damage, open_checkpoint, keep):
    home = damage.home(KV_A)
    size = home.stat().st_size
    os.truncate(home, keep if keep >= 0 else size + keep)
    refused(damage.directory, open_checkpoint, home, "truncated" if keep >= 8 or keep < 0 else "")


def test_shard_with_a_tail(damage, open_checkpoint):
    with damage.home(KV_A).open("ab") as file:
        file.write(b"x")
    refused(damage.directory, open_checkpoint, damage.home(KV_A), "longer than its header says")


def test_header_that_is_not_json(damage, open_checkpoint):
    with damage.home(KV_A).open("r+b") as file:
        file.seek(8)
        file.write(b"garbage!")
    refused(damage.directory, open_checkpoint, damage.home(KV_A), "corrupt safetensors header")


def test_file_that_is_something_else(damage, open_checkpoint):
    damage.home(KV_A).write_bytes(b"<!DOCTYPE html> not the file you wanted")
    refused(damage.directory, open_checkpoint, damage.home(KV_A), "not a safetensors file")


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda h: h[KV_A].update(dtype="F4"), "does not hold its shape"),
        (lambda h: h[KV_A].update(dtype=8), "is malformed"),
        (lambda h: h[KV_A].update(shape=[576, "200"]), "is malformed"),
        (lambda h: h[KV_A].update(shape=[576, -200]), "is malformed"),
        (lambda h: h[KV_A].update(shape=[577, 200]), "does not hold its shape"),
        (lambda h: h[KV_A].update(extra=1), "is malformed"),
        (lambda h: h.update({KV_A: 3}), "is malformed"),
    ],
)
def test_header_entries_are_checked(damage, open_checkpoint, edit, message):
    damage.edit_header(KV_A, edit)
    refused(damage.directory, open_checkpoint, damage.home(KV_A), KV_A, message)


def test_overlapping_tensors(damage, open_checkpoint):
    def overlap(header):
        first, last = header[KV_A]["data_offsets"]
        header[KV_A]["data_offsets"] = [first - 8, last - 8]

    damage.edit_header(KV_A, overlap)
    refused(damage.directory, open_checkpoint, damage.home(KV_A), "is out of place")


def test_key_twice_in_one_header(damage, open_checkpoint):
    content = damage.home(KV_A).read_bytes()
    length = int.from_bytes(content[:8], "little")
    entry = json.dumps(json.loads(content[8 : 8 + length])[KV_A])
    text = content[8 : 8 + length].rstrip()[:-1] + f',"{KV_A}":{entry}}}'.encode()
    damage.home(KV_A).write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
    refused(damage.directory, open_checkpoint, damage.home(KV_A), KV_A, "appears twice")


@pytest.mark.parametrize("key", [NORM, KV_A, EXPERT])
def test_missing_key(damage, open_checkpoint, key):
    damage.set(key, None)
    refused(damage.directory, open_checkpoint, f"lack {key!r}")


def test_missing_experts_are_counted(damage, open_checkpoint):
    damage.set(EXPERT, None)
    damage.set(EXPERT.replace("up_proj", "down_proj"), None)
    refused(damage.directory, open_checkpoint, f"{EXPERT!r} and 1 more")


def test_key_the_index_places_wrongly(damage, open_checkpoint):
    damage.weight_map[NORM] = next(
        name for name in sorted(set(damage.weight_map.values())) if name != damage.weight_map[NORM]
    )
    damage.write_index()
    refused(damage.directory, open_checkpoint, ".safetensors", NORM)


def test_index_places_a_key_in_a_file_without_it(damage, open_checkpoint):
    home = damage.home(NORM)
    damage.set(NORM, None)
    damage.weight_map[NORM] = home.name
    damage.write_index()
    refused(damage.directory, open_checkpoint, home, f"lacks {NORM!r}")


def test_key_in_two_shards(damage, open_checkpoint):
    first, second = sorted(set(damage.weight_map.values()))[:2]
    key = min(k for k, name in damage.weight_map.items() if name == first)
    content = load_file(damage.directory / second)
    save_file({**content, key: damage.get(key)}, damage.directory / second)
    refused(damage.directory, open_checkpoint, first, second, key, "one file only")


def test_key_the_index_does_not_list(damage, open_checkpoint):
    del damage.weight_map["model.layers.3.enorm.weight"]
    damage.write_index()
    refused(damage.directory, open_checkpoint, "layers.3.enorm.weight'", "does not list")


@pytest.mark.parametrize(
    "name",
    [
        "../model-00001-of-000003.safetensors",
        "/etc/x.safetensors",
        "a/../../x.safetensors",
        "..\\x.safetensors",
        "x\0.safetensors",
    ],
)
def test_index_leaving_the_directory(damage, open_checkpoint, name):
    damage.weight_map[NORM] = name
    damage.write_index()
    refused(damage.directory, open_checkpoint, INDEX, NORM, "outside the model directory")


@pytest.mark.parametrize("name", ["weights.bin", 3, None])
def test_index_naming_something_else(damage, open_checkpoint, name):
    damage.weight_map[NORM] = name
    damage.write_index()
    refused(damage.directory, open_checkpoint, INDEX, NORM, "no .safetensors file")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not a valid index"),
        ("\xff", "not a valid index"),
        ("[" * 100_000, "not a valid index"),
        ("[]", "has no weight_map"),
        ('{"weight_map": {}}', "has no weight_map"),
        ('{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}', "'a' appears twice"),
    ],
)
def test_damaged_index(damage, open_checkpoint, text, message):
    (damage.directory / INDEX).write_bytes(text.encode("latin-1"))
    refused(damage.directory, open_checkpoint, INDEX, message)


def test_no_weights_at_all(damage, open_checkpoint):
    (damage.directory / INDEX).unlink()
    refused(damage.directory, open_checkpoint, INDEX, "--weights none")


@pytest.mark.parametrize("key", [NORM, KV_A, EXPERT, "model.layers.1.mlp.gate.weight"])
def test_wrong_shape(damage, open_checkpoint, key):
    damage.set(key, damage.get(key)[1:])
    refused(damage.directory, open_checkpoint, damage.home(key), f"{key!r} has shape", "asks for")


@pytest.mark.parametrize("tag", ["I8", "F64", "F8_E5M2", "U16", "F8_E8M0", "C64"])
@pytest.mark.parametrize("key", [NORM, KV_A])
def test_wrong_dtype(damage, open_checkpoint, key, tag):
    damage.set(key, torch.ones(damage.get(key).shape).to(SAFETENSORS_DTYPES[tag]))
    home = damage.home(key)
    refused(damage.directory, open_checkpoint, home, key, f"stored as {tag};", "wanted F32, BF16")


def test_type_that_is_not_known(damage, open_checkpoint):
    """Refused where a weight needs the tensor, and nowhere else: no draft layer is asked for."""
    drafts = "model.layers.3.enorm.weight"
    damage.edit_header(drafts, lambda h: h[drafts].update(dtype="F7"))
    open_checkpoint(damage.directory)
    damage.edit_header(KV_A, lambda h: h[KV_A].update(dtype="F7"))
    refused(damage.directory, open_checkpoint, damage.home(KV_A), KV_A, "stored as F7; wanted F32")


def test_fp8_norm(damage, open_checkpoint):
    damage.set(NORM, damage.get(NORM).to(torch.float8_e4m3fn))
    refused(damage.directory, open_checkpoint, damage.home(NORM), NORM, "F8_E4M3")


@pytest.mark.parametrize("key", [KV_A, EXPERT])
def test_missing_scale(damage, open_checkpoint, key):
    damage.set(key + "_scale_inv", None)
    refused(damage.directory, open_checkpoint, damage.home(key), f"{key}_scale_inv", "are missing")


@pytest.mark.parametrize("key", [KV_A, EXPERT])
@pytest.mark.parametrize("change", ["floor", "transposed", "flat"])
def test_wrong_scale_grid(damage, open_checkpoint, key, change):
    scale = damage.get(key + "_scale_inv")
    wrong = {"floor": scale[:, :-1], "transposed": scale.T, "flat": scale.flatten()}[change]
    damage.set(key + "_scale_inv", wrong)
    home = damage.home(key + "_scale_inv")
    refused(damage.directory, open_checkpoint, home, f"{key}_scale_inv' has shape", "needs [")


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.uint8])
def test_wrong_scale_dtype(damage, open_checkpoint, dtype):
    key = KV_A + "_scale_inv"
    damage.set(key, damage.get(key).to(dtype))
    refused(damage.directory, open_checkpoint, damage.home(key), key, "scales must be F32")


def test_scale_of_a_plain_weight(damage, open_checkpoint):
    damage.set(KV_A, damage.get(KV_A).float().bfloat16())
    refused(damage.directory, open_checkpoint, f"{KV_A}_scale_inv", "plain BF16")


def test_fp8_without_quantization_config(damage, open_checkpoint):
    path = damage.directory / "config.json"
    config = json.loads(path.read_text())
    del config["quantization_config"]
    path.write_text(json.dumps(config))
    refused(damage.directory, open_checkpoint, "is FP8", "no quantization_config")


def test_scale_of_a_weight_in_whole_blocks(damage, open_checkpoint):
    """Values that were cast without their scales would be read as the weights."""
    key = "model.layers.0.self_attn.kv_b_proj.weight"
    damage.set(key, damage.get(key).float().bfloat16())
    refused(damage.directory, open_checkpoint, f"{key}_scale_inv", "plain BF16")


def test_unexpected_keys(damage, open_checkpoint):
    for number in range(4):
        damage.set(f"model.layers.0.self_attn.lora_{number}", torch.ones(2))
    # A layer's own extra keys are seen only when it is asked for.
    open_checkpoint(damage.directory, [1, 2])
    refused(damage.directory, open_checkpoint, "4 tensors do not belong", "lora_0", "lora_2, …")


def test_unexpected_keys_outside_layers(damage, open_checkpoint):
    damage.set("vision.patch_embed.weight", torch.ones(2))
    refused(damage.directory, open_checkpoint, "1 tensors do not", "vision.patch", layers=(0,))


def test_layers_beyond_the_configuration(damage, open_checkpoint):
    damage.set("model.layers.4.input_layernorm.weight", torch.ones(2))
    refused(damage.directory, open_checkpoint, "model.layers.4.input_layernorm.weight")


def test_mtp_layer_the_configuration_does_not_name(damage, open_checkpoint):
    path = damage.directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_nextn_predict_layers": 0}))
    refused(damage.directory, open_checkpoint, "model.layers.3.")


def test_scale_of_an_unquantised_weight(damage, open_checkpoint):
    damage.set("lm_head.weight_scale_inv", torch.ones(4, 2))
    refused(damage.directory, open_checkpoint, "lm_head.weight_scale_inv", "plain BF16")
