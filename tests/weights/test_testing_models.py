"""The fixture builders: what they write loads back, and means what they say."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import DeepseekV32Config, DeepseekV32ForCausalLM

from dsa_compile.frontend.architectures import spec_of
from examples.small_models.models import (
    dequantise,
    dequantised_twin,
    quantise,
    save_byte_tokenizer,
    save_hf,
    save_hub,
    tiny_config,
    tiny_model,
)


def test_model_depends_on_seed_alone():
    config = tiny_config()
    torch.manual_seed(1)
    before = torch.rand(1)
    torch.manual_seed(1)
    first = tiny_model(config).state_dict()
    assert torch.equal(before, torch.rand(1)), "the global generator moved"
    second, other = tiny_model(config).state_dict(), tiny_model(config, seed=1).state_dict()
    assert all(torch.equal(first[n], second[n]) for n in first)
    assert not any(torch.equal(first[n], other[n]) for n in first)


def test_every_parameter_matters():
    for name, tensor in tiny_model(tiny_config()).state_dict().items():
        assert tensor.std() > 0.01, name


def test_bf16_keeps_what_must_be_fp32():
    model = tiny_model(tiny_config(), dtype=torch.bfloat16)
    state = model.state_dict()
    matrices = {n for n in state if n.endswith("mlp.gate.weight")}
    assert all(torch.equal(state[n], state[n].bfloat16().to(state[n].dtype)) for n in matrices)
    kept = {n for n, t in state.items() if t.dtype == torch.float32} - matrices
    assert kept == {n for n in state if "weights_proj" in n or "e_score_correction" in n}
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32
    with torch.no_grad():
        assert model(torch.arange(40)[None]).logits.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_save_hf_loads_in_transformers(tmp_path, dtype):
    model = tiny_model(tiny_config(), dtype=dtype)
    save_hf(model, tmp_path, max_shard_size="1MB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    loaded = DeepseekV32ForCausalLM.from_pretrained(tmp_path, dtype=dtype).state_dict()
    for name, tensor in model.state_dict().items():
        # from_pretrained rounds weights_proj to bf16 whatever the file holds
        assert torch.equal(loaded[name], tensor.to(loaded[name].dtype)), name


def test_save_hf_fused(tmp_path):
    model = tiny_model(tiny_config())
    save_hf(model, tmp_path, fused_experts=True)
    loaded = load_file(tmp_path / "model.safetensors")
    assert loaded.keys() == model.state_dict().keys()


def test_hub_layout(tmp_path):
    config = tiny_config()
    save_hub(tiny_model(config), tmp_path)
    weight_map = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(weight_map.values())) == 3
    assert "model.layers.2.mlp.experts.15.gate_proj.weight_scale_inv" in weight_map
    assert "model.layers.4.eh_proj.weight" in weight_map
    for name in ("embed_tokens", "layers.0.input_layernorm", "layers.2.mlp.gate"):
        assert f"model.{name}.weight_scale_inv" not in weight_map
    name = "model.layers.0.mlp.gate_proj.weight"  # 192 rows: two blocks, the second not full
    with safe_open(tmp_path / weight_map[name + "_scale_inv"], "pt") as file:
        assert file.get_slice(name + "_scale_inv").get_shape() == [2, 1]


def test_hub_config_means_the_same(tmp_path):
    config = tiny_config(first_k_dense_replace=1)
    save_hub(tiny_model(config), tmp_path)
    read = DeepseekV32Config.from_pretrained(tmp_path)
    for name, value in config.rope_parameters.items():
        assert read.rope_parameters[name] == value
    spec = spec_of(read.to_dict())
    assert spec.layer_kinds == ("dense", "moe", "moe", "moe")
    assert spec.num_nextn_predict_layers == 1
    assert spec.quantization is not None


def test_quantise_uses_ceil_grids():
    weight = torch.randn(576, 200) * torch.linspace(0.01, 10, 576)[:, None]
    stored, scale = quantise(weight)
    assert scale.shape == (5, 2)
    assert stored.shape == weight.shape
    error = (dequantise(stored, scale) - weight).abs()
    assert (error <= weight.abs() / 16 + scale.repeat_interleave(128, 0)[:576, :1] * 2**-9).all()


def test_twin_differs_by_rounding_only():
    model = tiny_model(tiny_config())
    twin = dequantised_twin(model).state_dict()
    for name, tensor in model.state_dict().items():
        error = (twin[name] - tensor).abs().max() / tensor.abs().max()
        assert error < 0.07, name
    assert not torch.equal(twin["lm_head.weight"], model.state_dict()["lm_head.weight"])


def test_byte_tokenizer_round_trip(tmp_path):
    from tokenizers import Tokenizer

    save_byte_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    text = "Hello, wörld — 你好\n\t 42  spaces"
    ids = tokenizer.encode(text).ids
    assert len(ids) == len(text.encode())
    assert max(ids) < 512
    assert tokenizer.decode(ids) == text
    assert tokenizer.token_to_id("<bos>") == 0
    assert tokenizer.token_to_id("<eos>") == 1
    assert tokenizer.decode([0, *ids, 1]) == text
