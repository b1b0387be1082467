"""Stored tensors that no weight needs: what transformers leaves out is left out with a note."""

import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from dsa_compile.errors import CheckpointError
from dsa_compile.frontend.architectures import ARCHITECTURES
from dsa_compile.frontend.build import load_spec
from dsa_compile.weights.checkpoint import Checkpoint
from examples.small_models.models import (
    save_hf,
    tiny_axk2_config,
    tiny_config,
    tiny_glm_config,
    tiny_mistral_config,
    tiny_model,
)


def stored(directory, config, **beside):
    """A saved model with further tensors beside its own."""
    save_hf(tiny_model(config), directory)
    file = directory / "model.safetensors"
    save_file({**load_file(file), **beside}, file, metadata={"format": "pt"})
    return directory


def opened(directory):
    spec = load_spec(directory)
    layers = range(spec.num_hidden_layers)
    checkpoint = Checkpoint.open(directory, spec, layers)
    return lambda *ignored: checkpoint.set_aside(spec, layers, ignored)


@pytest.mark.parametrize("make", [tiny_config, tiny_glm_config, tiny_axk2_config])
@pytest.mark.parametrize(
    "name", ["model.layers.0.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq"]
)
def test_frequencies_are_computed(make, name, tmp_path):
    directory = stored(tmp_path, make(1), **{name: torch.ones(8)})
    _, told = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert not told["unexpected_keys"]
    assert opened(directory)() == ("1 tensors of RoPE's frequencies skipped, which are computed",)


def test_indexers_of_layers_that_share_a_selection(tmp_path):
    shared = {
        name.replace("layers.1.", "layers.2."): tensor
        for name, tensor in tiny_model(tiny_glm_config(3)).state_dict().items()
        if name.startswith("model.layers.1.self_attn.indexer.")
    }
    directory = stored(tmp_path, tiny_glm_config(3), **shared)
    (note,) = opened(directory)()
    assert note.startswith(f"{len(shared)} tensors skipped of layers that take what an earlier")
    _, told = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert told["unexpected_keys"] == shared.keys()  # left out as well, with a warning


def test_nothing_to_say_of_a_saved_model(tmp_path):
    assert opened(stored(tmp_path, tiny_config(1)))() == ()


def test_a_mtp_layer_is_noted(hub_dir):
    (note,) = opened(hub_dir)()
    assert re.fullmatch(r"MTP layer 3: \d+ tensors skipped", note)


def test_what_the_user_ignores(tmp_path):
    name = "model.layers.0.self_attn.lora_a"
    judge = opened(stored(tmp_path, tiny_config(1), **{name: torch.ones(2)}))
    with pytest.raises(
        CheckpointError, match=r"lora_a; does config.*give --ignore-tensors PATTERN"
    ):
        judge()
    for pattern in (name, "*.lora_?"):
        assert judge(pattern) == ("1 tensors ignored, as --ignore-tensors says",)
    for pattern in ("*.lora_b", "model.embed_tokens.weight"):
        with pytest.raises(CheckpointError, match=r"names no tensor that is stored and not needed"):
            judge(name, pattern)


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_all_that_the_reference_model_is_told_to_ignore_is_known(model_type):
    """Its last layers are those for drafts, which config.json counts."""
    model = ARCHITECTURES[model_type].model
    patterns = set(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
    known = {"inv_freq", r"mtp_dspark\..*", r"model\.layers\.61.*", r"model\.layers\.78.*"}
    assert patterns <= known


@pytest.mark.parametrize("borrowed", ["wkv_a_with_mqa.weight", "kv_a_norm.weight"])
def test_latents_that_a_layer_borrows(borrowed, tmp_path):
    pytest.importorskip("transformers.models.mistral_large4")
    config = tiny_mistral_config(4, kv_source_layers=[0, 0, 2, 3])
    save_hf(tiny_model(config), tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    own = next(k for k in tensors if "layers.0." in k and k.endswith(borrowed))
    tensors[own.replace("layers.0.", "layers.1.")] = tensors[own].clone()
    save_file(tensors, file, metadata={"format": "pt"})
    assert any(note.startswith("1 tensors skipped of layers that") for note in opened(tmp_path)())
