"""Checkpoints that transformers' own FP8 code quantises and saves, read as it reads them."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, FineGrainedFP8Config
from transformers.integrations import finegrained_fp8
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

from dsa_compile.errors import CheckpointError, ConfigError
from dsa_compile.frontend.build import load_spec
from dsa_compile.measure.eval.loader_check import compare_loaders
from dsa_compile.weights.checkpoint import Checkpoint
from examples.small_models.models import save_hub, tiny_config, tiny_model

BLOCKS = dict.fromkeys(("hidden_size", "intermediate_size", "moe_intermediate_size"), 256)
# transformers cannot read back what it saves of matrices that are no whole blocks
WHOLE = BLOCKS | dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim"), 128)

if not hasattr(finegrained_fp8, "_dequantize_fp8_weight"):
    pytest.skip("these fp8 checkpoints need a newer transformers", allow_module_level=True)


def quantised(directory, scale_fmt, **sizes):
    """A model that transformers quantised: one tensor of scales for all experts of a layer."""
    config = tiny_config(2, first_k_dense_replace=1, n_routed_experts=8, **sizes)
    tiny_model(config, dtype=torch.bfloat16).save_pretrained(directory / "plain")
    wanted = FineGrainedFP8Config(scale_fmt=scale_fmt)
    return AutoModelForCausalLM.from_pretrained(
        directory / "plain", dtype=torch.bfloat16, quantization_config=wanted
    )


def loaded(directory, scale_fmt):
    """A published FP8 model that transformers loaded; scales and matrices end inside blocks."""
    sizes = BLOCKS | {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": 128}
    config = tiny_config(2, first_k_dense_replace=1, n_routed_experts=8, **sizes)
    save_hub(tiny_model(config), directory / "hub", mtp=False)
    return AutoModelForCausalLM.from_pretrained(directory / "hub", dtype=torch.bfloat16)


@pytest.fixture
def transformers_without_gpu(monkeypatch):
    """It dequantises on a CPU otherwise."""
    monkeypatch.setattr(FineGrainedFP8HfQuantizer, "validate_environment", lambda *_, **__: None)


@pytest.fixture(
    params=[(quantised, "float"), (quantised, "ue8m0"), (loaded, "float")],
    ids=lambda given: f"{given[0].__name__}-{given[1]}",
)
def saved(request, tmp_path, transformers_without_gpu):
    make, scale_fmt = request.param
    sizes = WHOLE | {"index_head_dim": 256} if make is quantised else {}
    make(tmp_path, scale_fmt, **sizes).save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"


def as_transformers_reads(directory):
    """All parameters, fp32, and what scales they have there."""
    state = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).state_dict()
    for name, value in state.items():
        scale = state.get(f"{name}_scale_inv")
        if scale is not None:
            yield (
                name,
                finegrained_fp8._dequantize_fp8_weight(value, scale, [128, 128], torch.float32),
            )
        elif not name.endswith("_scale_inv"):
            yield name, value.float()


def check_values(directory):
    spec = load_spec(directory)
    checkpoint = Checkpoint.open(directory, spec, (0, 1))
    stored = set()
    for name, want in as_transformers_reads(directory):
        got = torch.empty(checkpoint.shape(name))
        checkpoint.read_into(name, got)
        assert torch.equal(got, want), name
        stored.add(checkpoint.stored_dtype(name))
    assert torch.float8_e4m3fn in stored
    assert compare_loaders(directory, spec, (0, 1)) == []


def test_values_are_those_that_transformers_reads(saved):
    check_values(saved)
    given = json.loads((saved / "config.json").read_text())["quantization_config"]["scale_fmt"]
    assert load_spec(saved).quantization.scale_fmt == (None if given == "float" else given)


def test_scales_of_other_types(saved):
    """Scales that training code cast to bf16, or that are written as bytes of exponents."""
    file = saved / "model.safetensors"
    tensors = load_file(file)
    for name in tensors:
        if name.endswith("_scale_inv"):
            scale = tensors[name]
            powers = scale.dtype is torch.float8_e8m0fnu
            tensors[name] = scale.view(torch.uint8) if powers else scale.bfloat16()
    save_file(tensors, file, metadata={"format": "pt"})
    check_values(saved)


def test_scales_that_transformers_never_set_are_not_believed(tmp_path, transformers_without_gpu):
    """Beside a matrix that is no whole blocks, which it left as it was."""
    quantised(tmp_path, "float", **BLOCKS).save_pretrained(tmp_path / "saved")
    spec = load_spec(tmp_path / "saved")
    checkpoint = Checkpoint.open(tmp_path / "saved", spec, (0, 1))
    with pytest.raises(CheckpointError, match=r"_scale_inv' gives scales, but the weight is plain"):
        checkpoint.set_aside(spec, (0, 1))
    (note,) = checkpoint.set_aside(spec, (0, 1), ["*.self_attn.*_scale_inv"])
    assert note == "12 tensors ignored, as --ignore-tensors says"
    name = "model.layers.0.self_attn.q_a_proj.weight"
    got = torch.empty(checkpoint.shape(name))
    checkpoint.read_into(name, got)
    assert torch.equal(got, load_file(tmp_path / "plain" / "model.safetensors")[name].float())


def test_experts_in_four_bits_are_refused_by_name(tmp_path):
    quantization = FineGrainedFP8Config(expert_dtype="fp4").to_dict()
    config = tiny_config(2).to_dict() | {"quantization_config": quantization}
    (tmp_path / "config.json").write_text(json.dumps(config, default=str))
    with pytest.raises(ConfigError, match=r"expert_dtype must be 'fp8' or absent, found 'fp4'"):
        load_spec(tmp_path)
