"""What is said to be ignored by transformers is ignored there, and what it reads is taken."""

import copy
import json
from typing import Any

import pytest
import torch

from dsa_compile.errors import ConfigError
from dsa_compile.frontend.architectures import ARCHITECTURES, load_config, spec_of
from dsa_compile.frontend.config_fields import check_fields
from examples.small_models.models import (
    tiny_axk2_config,
    tiny_config,
    tiny_glm_config,
    yarn_parameters,
)

# Of the 2,300 names of fields that configurations of transformers declare, those that our classes
# read without declaring them, and some that none does.
READ = (
    *("original_max_position_embeddings", "partial_rotary_factor", "num_labels"),
    *("per_layer_config", "mtp_layer_types"),
)
UNREAD = ("sliding_window", "rope_local_base_freq", "num_mtp_layers", "logit_scale", "qk_norm")
# A small model in the words of DeepSeek's own code
NATIVE = json.loads(
    """{"dim": 128, "inter_dim": 192, "moe_inter_dim": 64, "n_layers": 4, "n_dense_layers": 2,
    "n_heads": 8, "n_activated_experts": 4, "n_expert_groups": 4, "n_limited_groups": 2,
    "route_scale": 2.5, "score_func": "sigmoid", "original_seq_len": 4096, "rope_factor": 40,
    "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "scale_fmt": null, "max_seq_len": 16384,
    "max_batch_size": 8}"""
)


def small(make: Any) -> dict[str, Any]:
    config: dict[str, Any] = make(2).to_dict()
    rope = {**yarn_parameters(), "factor": 4.0}
    del rope["original_max_position_embeddings"]  # a field of its own may say it
    return config | {"rope_parameters": rope}


def computed(raw: dict[str, Any]) -> tuple[dict[str, Any], torch.Tensor]:
    """All that a model is made from: fields of the configuration, and RoPE's frequencies."""
    entry = ARCHITECTURES[raw["model_type"]]
    config = entry.config(**copy.deepcopy(raw))
    return config.to_dict(), entry.rotary(config).inv_freq


@pytest.mark.parametrize("make", [tiny_config, tiny_glm_config, tiny_axk2_config])
@pytest.mark.parametrize("name", [*READ, *UNREAD])
@pytest.mark.parametrize("value", [3, 0.5, [1]])
def test_what_is_called_ignored_has_no_effect(make: Any, name: str, value: Any) -> None:
    raw = small(make)
    entry = ARCHITECTURES[raw["model_type"]]
    try:
        check_fields({**raw, name: value}, entry.config, entry.extra_fields)
    except ConfigError as error:
        if "would ignore" not in str(error):
            return
        assert name in UNREAD
        before, frequencies = computed(raw)
        after, others = computed({**raw, name: value})
        assert before == {n: v for n, v in after.items() if n != name}
        assert torch.equal(frequencies, others)


def test_a_length_of_training_beside_rope(tmp_path: Any) -> None:
    """As transformers reads it: the frequencies are those of the same number inside."""
    inside = small(tiny_config)
    inside["rope_parameters"] = {
        **inside["rope_parameters"],
        "original_max_position_embeddings": 256,
    }
    beside = small(tiny_config) | {"original_max_position_embeddings": 256}
    frequencies = [
        ARCHITECTURES["deepseek_v32"].rotary(load_config(raw)).inv_freq for raw in (inside, beside)
    ]
    assert torch.equal(*frequencies)
    assert not torch.equal(frequencies[0], computed(small(tiny_config))[1])


def test_fields_that_only_repeat_others() -> None:
    config = tiny_config().to_dict()
    assert spec_of(load_config(config | NATIVE).to_dict()) == spec_of(config)
