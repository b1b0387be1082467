import torch
from transformers import DeepseekV32Config, DeepseekV32ForCausalLM

from dsa_compile.frontend.architectures import spec_of
from dsa_compile.weights.canonical import canonical_parameters, compute_dtype
from examples.small_models.models import tiny_config, yarn_parameters


def reference_shapes(config):
    with torch.device("meta"):
        model = DeepseekV32ForCausalLM(config)
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def test_names_and_shapes_are_the_reference_models():
    config = tiny_config(5, n_shared_experts=2, index_n_heads=24, v_head_dim=24)
    ours = canonical_parameters(spec_of(config.to_dict()), range(5))
    assert {name: info.shape for name, info in ours.items()} == reference_shapes(config)


def test_names_and_shapes_of_the_full_geometry():
    config = DeepseekV32Config(rope_parameters=yarn_parameters())
    ours = canonical_parameters(spec_of(config.to_dict()), range(61))
    assert {name: info.shape for name, info in ours.items()} == reference_shapes(config)


def test_only_the_given_layers():
    spec = spec_of(tiny_config(4).to_dict())
    names = canonical_parameters(spec, [1, 2])
    assert {n.split(".")[2] for n in names if ".layers." in n} == {"1", "2"}
    assert {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"} <= names.keys()


def test_what_stays_fp32():
    spec = spec_of(tiny_config(3).to_dict())
    kept = [name for name, info in canonical_parameters(spec, range(3)).items() if info.keep_fp32]
    assert kept == [
        "model.layers.0.self_attn.indexer.weights_proj.weight",
        "model.layers.1.self_attn.indexer.weights_proj.weight",
        "model.layers.2.self_attn.indexer.weights_proj.weight",
        "model.layers.2.mlp.gate.e_score_correction_bias",
    ]
    assert compute_dtype(kept[0], torch.bfloat16) == torch.float32
    assert compute_dtype("model.norm.weight", torch.bfloat16) == torch.bfloat16
