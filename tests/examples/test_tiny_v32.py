"""The committed checkpoint: the reference loads it, agrees with the training code, and recalls."""

import json
import math
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import DeepseekV32ForCausalLM

from examples.small_models.models import dequantise
from examples.tiny_v32 import evaluate, quantize_fp8
from examples.tiny_v32.attention import Aux, Select
from examples.tiny_v32.config import TinyConfig
from examples.tiny_v32.export import FILE, load_checkpoint, to_hub
from examples.tiny_v32.model import TinyModel
from examples.tiny_v32.recall import Prompt
from tests.trained import trained_model

DISTANCE = 320  # five times index_topk


@cache
def trained() -> TinyModel:
    return load_checkpoint(trained_model())


@cache
def reference() -> DeepseekV32ForCausalLM:
    return DeepseekV32ForCausalLM.from_pretrained(trained_model(), dtype=torch.float32).eval()


@cache
def prompts() -> list[Prompt]:
    tokenizer, tokens = evaluate.held_out(trained_model())
    return evaluate.recall_prompts(tokenizer, tokens, DISTANCE, 3, seed=7)


def test_reference_gives_the_logits_of_the_training_code() -> None:
    _, tokens = evaluate.held_out(trained_model())
    ids = torch.tensor([[0, *tokens[:299].tolist()]])
    with torch.inference_mode():
        wanted = reference()(ids).logits
        got, _, _ = trained()(ids, Select.TOPK, mtp=False)
        dense, _, _ = trained()(ids, Select.ALL, mtp=False)
    torch.testing.assert_close(got, wanted, atol=1e-4, rtol=0)
    assert (dense - wanted).abs().max() > 1e-2, "the text is too short to select anything"


def test_recalls_beyond_topk() -> None:
    with torch.inference_mode():
        for prompt in prompts():
            assert prompt.distance == DISTANCE
            ids = torch.tensor([prompt.ids])
            out = reference().generate(
                ids, max_new_tokens=len(prompt.answer), min_new_tokens=len(prompt.answer)
            )
            assert out[0, len(prompt.ids) :].tolist() == prompt.answer


@pytest.mark.parametrize("wrong", [Select.RECENT, Select.RANDOM, Select.WRONG_ROPE])
def test_wrong_selection_loses_recall(wrong: Select) -> None:
    # The right selection finds all of them: test_recalls_beyond_topk.
    torch.manual_seed(0)
    assert evaluate.recall(trained(), prompts(), wrong, "cpu") == 0.0


def test_attention_falls_on_the_selected_keys() -> None:
    _, tokens = evaluate.held_out(trained_model())
    ids = torch.tensor([[0, *tokens[:511].tolist()]])
    spread = {}
    with torch.inference_mode():
        for select in (Select.TOPK, Select.RANDOM):
            spread[select] = trained()(ids, select, Aux.INDEX_AND_SPREAD)[2][1].item()
    layers = TinyConfig().num_hidden_layers + 1  # and the MTP module's
    assert spread[Select.TOPK] / layers < -math.log(0.98)
    assert spread[Select.RANDOM] / layers > -math.log(0.5)


def test_stored_tensors_are_those_of_the_hub_layout() -> None:
    stored = load_file(trained_model() / FILE)
    index = json.loads((trained_model() / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(stored)
    again = to_hub(trained().state_dict(), TinyConfig())
    assert again.keys() == stored.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in stored.items())
    assert "model.layers.5.shared_head.head.weight" in stored
    assert (trained_model() / FILE).stat().st_size <= 12e6


def test_fp8_copy(tmp_path: Path) -> None:
    out = tmp_path / "fp8"
    quantize_fp8.quantize_checkpoint(trained_model(), out)
    before, after = load_file(trained_model() / FILE), load_file(out / FILE)
    scales = {name for name in after if name.endswith("_scale_inv")}
    assert set(after) - scales == set(before)
    for name in scales:
        weight, scale = after[name.removesuffix("_scale_inv")], after[name]
        assert weight.dtype == torch.float8_e4m3fn
        assert scale.shape == tuple(-(-size // 128) for size in weight.shape)
        assert torch.equal(torch.log2(scale).round().exp2(), scale)
        wide = before[name.removesuffix("_scale_inv")].float()
        # Half a step of a 3-bit mantissa, and half a subnormal step where a value is tiny.
        bound = wide.abs() / 16 + scale.max() * 2**-10
        assert ((dequantise(weight, scale) - wide).abs() <= bound).all()
    assert "model.layers.0.self_attn.kv_a_proj_with_mqa.weight_scale_inv" in scales
