"""Quantised checkpoints that are not taken, named by what people call their format."""

import json
from typing import Any

import pytest

from dsa_compile.errors import ConfigError
from dsa_compile.frontend.build import load_spec
from examples.small_models.models import tiny_config

LAYERS = [f"model.layers.{n}.self_attn.q_a_proj" for n in range(61)]
QUARK = {
    "algo_config": None,
    "exclude": LAYERS,
    "export": {"kv_cache_group": [], "min_kv_scale": 0.0, "pack_method": "reorder"},
    "global_quant_config": {"weight": {"dtype": "fp4", "qscheme": "per_group", "group_size": 32}},
    "quant_method": "quark",
}
COMPRESSED = {
    "config_groups": {
        "group_0": {
            "input_activations": None,
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "float", "strategy": "tensor_group"},
        }
    },
    "format": "nvfp4-pack-quantized",
    "ignore": LAYERS,
    "quant_method": "compressed-tensors",
}
MODELOPT = {
    "config_groups": {},
    "ignore": LAYERS,
    "quant_algo": "NVFP4",
    "quant_method": "modelopt",
}
PRODUCER = {"name": "modelopt", "version": "0.39.0"}


def refusal(directory, config: dict[str, Any]) -> str:
    (directory / "config.json").write_text(json.dumps(tiny_config(2).to_dict() | config))
    with pytest.raises(ConfigError) as error:
        load_spec(directory)
    return str(error.value)


@pytest.mark.parametrize(
    ("found", "told"),
    [
        (QUARK, "quant_method='quark', dtype='fp4', qscheme='per_group', group_size=32 is not"),
        (
            COMPRESSED,
            "quant_method='compressed-tensors', format='nvfp4-pack-quantized', num_bits=4, "
            "type='float', strategy='tensor_group' is not supported",
        ),
        (MODELOPT, "quant_method='modelopt', quant_algo='NVFP4' is not supported"),
        ({"bits": 4}, "quant_method=None, bits=4 is not supported"),
    ],
)
def test_a_format_is_named(found, told, tmp_path):
    message = refusal(tmp_path, {"quantization_config": found})
    assert told in message
    assert "only quant_method 'fp8' with a two-element weight_block_size" in message
    assert "q_a_proj" not in message


@pytest.mark.parametrize("config", [{}, {"quantization_config": None}])
def test_a_format_that_another_file_names(config, tmp_path):
    beside = tmp_path / "hf_quant_config.json"
    said: dict[str, Any] = {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": LAYERS}
    beside.write_text(json.dumps({"producer": PRODUCER, "quantization": said}))
    told = "quant_method='modelopt (hf_quant_config.json)', quant_algo='NVFP4', group_size=16"
    assert told in refusal(tmp_path, config)
    said = {"quant_algo": None, "kv_cache_quant_algo": "FP8"}
    beside.write_text(json.dumps({"producer": PRODUCER, "quantization": said}))
    assert load_spec(tmp_path).quantization is None
    for text in ("{", "[]", '{"quantization": 3}'):
        beside.write_text(text)
        assert f"{beside}: " in refusal(tmp_path, config)
