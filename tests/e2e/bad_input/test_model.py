"""Model directories that are none, or damaged."""

import json
import os
import shutil

import pytest
import torch

from examples.small_models import models
from tests.e2e.bad_input.damage import NORM, edit_json, edit_shard, shard_of

FP8_BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def test_missing_shard(model, refusal):
    path = shard_of(model, NORM)
    path.unlink()
    assert f"{path}: missing" in refusal.compiling(model)


@pytest.mark.parametrize("keep", [0, 4, 100, 0.5, -1])
def test_truncated_shard(model, refusal, keep):
    path = shard_of(model, NORM)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep) if isinstance(keep, float) else keep])
    assert str(path) in refusal.compiling(model)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda t: t[:-1].clone(), "has shape [127], config.json asks for [128]"),
        (lambda t: t.double(), "is stored as F64; wanted F32, BF16, F16"),
        (lambda t: t.to(torch.int8), "is stored as I8"),
    ],
)
def test_wrong_shape_or_dtype(model, refusal, change, what):
    path = edit_shard(model, NORM, lambda t: t.update({NORM: change(t[NORM])}))
    assert f"{path}: '{NORM}' {what}" in refusal.compiling(model)


def test_missing_key(model, refusal):
    path = edit_shard(model, NORM, lambda t: t.pop(NORM))
    assert f"{path}: lacks '{NORM}'" in refusal.compiling(model)


def test_key_in_two_shards(model, refusal):
    path = edit_shard(model, "lm_head.weight", lambda t: t.update({NORM: torch.ones(128)}))
    message = refusal.compiling(model)
    assert f"{path}: holds '{NORM}'" in message
    assert "in one file only" in message


def test_index_leading_out_of_the_model_directory(model, refusal):
    index = model / "model.safetensors.index.json"
    names = json.loads(index.read_text())["weight_map"]
    edit_json(index, weight_map=names | {NORM: "../stolen.safetensors"})
    assert "outside the model directory" in refusal.compiling(model)


@pytest.mark.parametrize(
    ("values", "what"),
    [
        ({"model_type": "llama"}, "model_type='llama' is not supported; dsa-compile takes"),
        ({"hidden_size": 10**30}, "hidden_size=1"),
        ({"n_routed_experts": 2**40}, "n_routed_experts=1099511627776 must be from 1 to 65536"),
        ({"index_topk": 0}, "index_topk=0 must be from 1"),
        ({"num_hidden_layers": 3}, "num_hidden_layers"),
        ({"vocab_size": 100}, "'model.embed_tokens.weight' has shape [512, 128]"),
        ({"n_group": 3}, "n_routed_experts=8 must divide into n_group=3 groups"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported, only 'silu'"),
        ({"scoring_func": "softmax"}, "scoring_func='softmax' is not supported, only 'sigmoid'"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope"),
        ({"rope_parameters": {"rope_type": "none"}}, "rope_type='none' is not supported"),
        ({"rope_parameters": {"rope_theta": 1e-300}}, "RoPE's frequencies are not finite"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": None}}, "'yarn' needs a factor"),
        ({"rope_parameters": 5}, "rope_parameters=5 should be an object"),
        ({"quantization_config": 5}, "quantization_config=5 should be an object"),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [0, "a"]}},
            "two-element weight_block_size",
        ),
        (
            {"quantization_config": {**FP8_BLOCKS, "activation_scheme": "static"}},
            "quantization_config.activation_scheme must be 'dynamic' or absent, found 'static'",
        ),
        (
            {"quantization_config": {**FP8_BLOCKS, "fmt": "e5m2"}},
            "quantization_config.fmt must be 'e4m3' or absent, found 'e5m2'",
        ),
        ({"eos_token_id": [1, -7]}, "eos_token_id=[1, -7] must name token ids"),
        ({"num_nextn_predict_layers": "x"}, "num_nextn_predict_layers='x' should be int"),
    ],
)
def test_config_values(model, refusal, values, what):
    edit_json(model / "config.json", **values)
    assert what in refusal.compiling(model)


def test_blocks_that_the_recipe_cannot_load(tmp_path, refusal, monkeypatch):
    monkeypatch.setattr(models, "FP8_BLOCK", (64, 64))
    models.save_hub(models.tiny_model(models.tiny_config(1)), tmp_path / "model", mtp=False)
    message = refusal.compiling(tmp_path / "model", "--recipe", "fp8")
    assert "is quantised in blocks of (64, 64), recipe fp8 takes 128x128" in message


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"", "not valid JSON"),
        (b"\xff\xfe{}", "not valid JSON ('utf-8' codec"),
        (b"[]", "expected a JSON object, found list"),
        (b'{"model_type": "deep', "not valid JSON (Unterminated string"),
        (b'{"a": 1, "a": 2}', "key 'a' appears twice"),
        (b'{"a": ' + b"[" * 100_000, "nested too deeply"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not valid JSON (Exceeds the limit"),
        (b'{"a": NaN}', "NaN is not a number JSON has"),
    ],
)
def test_config_that_is_no_config(model, refusal, data, what):
    (model / "config.json").write_bytes(data)
    message = refusal.compiling(model)
    assert f"{model / 'config.json'}: " in message
    assert what in message


def test_a_float_too_large(model, refusal):
    text = (model / "config.json").read_text()
    edited = text.replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e999')
    assert edited != text
    (model / "config.json").write_text(edited)
    assert "rms_norm_eps=inf must be a positive number" in refusal.compiling(model)


def test_a_name_that_no_artifact_could_keep(model, tmp_path, refusal):
    named = model.rename(os.fsdecode(os.fsencode(tmp_path / "model") + b"\xff"))
    message = refusal.compiling(named)
    assert "no UTF-8, so an artifact could not name the directory" in message
    assert "\n" not in message.rstrip()


def test_directories_that_are_no_model(tmp_path, refusal):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    assert "config.json: missing" in refusal.compiling(tmp_path / "empty")
    assert "is a file; give the model's directory" in refusal.compiling(tmp_path / "file")
    assert "no such directory" in refusal.compiling(tmp_path / "absent")


def test_config_that_is_a_directory(tmp_path, refusal):
    (tmp_path / "model/config.json").mkdir(parents=True)
    assert "config.json: cannot be read (Is a directory)" in refusal.compiling(tmp_path / "model")


def test_a_model_without_weights(source, tmp_path, refusal):
    (tmp_path / "model").mkdir()
    shutil.copy(source / "config.json", tmp_path / "model")
    message = refusal.compiling(tmp_path / "model")
    assert "no weights" in message
    assert "--weights none" in message
