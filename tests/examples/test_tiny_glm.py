"""The small GLM-5: what is exported is what transformers' own class computes, trained or not."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import GlmMoeDsaForCausalLM

from dsa_compile.frontend.build import load_spec
from dsa_compile.measure.eval.hf import HfModel
from examples.tiny_glm.config import TinyGlmConfig
from examples.tiny_v32.attention import Aux, Select, rope_tables
from examples.tiny_v32.export import FILE, load_checkpoint, write_checkpoint
from examples.tiny_v32.model import TinyModel
from examples.tiny_v32.quantize_fp8 import quantize_checkpoint
from tests.trained import trained_model

LENGTH = 200  # three times index_topk
CONFIG = TinyGlmConfig()


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with random weights, exported in bf16."""
    path = tmp_path_factory.mktemp("tiny_glm") / "bf16"
    model = TinyModel(CONFIG)
    model.initialise(0)
    write_checkpoint(model, trained_model(), path)
    return path


def ids() -> torch.Tensor:
    return torch.randint(3, CONFIG.vocab_size, (1, LENGTH), generator=torch.manual_seed(0))


def logits(model: TinyModel, select: Select) -> torch.Tensor:
    with torch.inference_mode():
        return model(ids(), select)[0]


def test_reference_gives_the_logits_of_the_training_code(exported: Path) -> None:
    reference = GlmMoeDsaForCausalLM.from_pretrained(exported, dtype=torch.float32).eval()
    owners = [layer.self_attn.indexer is not None for layer in reference.model.layers]
    assert owners == [True, True, False, True, False]
    with torch.inference_mode():
        wanted = reference(ids()).logits
    trained = load_checkpoint(exported)
    torch.testing.assert_close(logits(trained, Select.TOPK), wanted, atol=1e-4, rtol=0)
    for wrong in (Select.ALL, Select.WRONG_ROPE):
        assert (logits(trained, wrong) - wanted).abs().max() > 1e-2


def test_layers_that_reuse_a_selection_teach_the_indexer_that_made_it() -> None:
    model = TinyModel(CONFIG)
    model.initialise(0)
    rope = rope_tables(CONFIG, LENGTH, torch.device("cpu"))
    hidden = torch.randn(1, LENGTH, CONFIG.hidden_size)
    _, _, selected = model.layers[3](hidden, rope, Select.TOPK, Aux.INDEX)
    assert selected is not None
    _, losses, handed_on = model.layers[4](hidden, rope, Select.TOPK, Aux.INDEX, selected)
    assert handed_on is selected
    losses[0].backward()
    taught = {n for n, p in model.named_parameters() if p.grad is not None and p.grad.any()}
    assert taught == {n for n, _ in model.named_parameters() if "layers.3.self_attn.indexer" in n}


def test_fp8_copy_is_read_at_the_values_it_stores(exported: Path, tmp_path: Path) -> None:
    quantize_checkpoint(exported, tmp_path / "fp8")
    assert (tmp_path / "fp8" / FILE).stat().st_size <= 12e6
    stored = load_file(tmp_path / "fp8" / FILE)
    kept = {n for n, t in stored.items() if t.dim() == 2 and t.dtype == torch.bfloat16}
    assert {n.rpartition("layers.")[2].lstrip("0123456789.") for n in kept} == {
        "model.embed_tokens.weight",
        "lm_head.weight",
        "mlp.gate.weight",
        "self_attn.indexer.weights_proj.weight",
    }
    reference = HfModel(tmp_path / "fp8", load_spec(tmp_path / "fp8"))
    (wanted,) = reference.logits([ids()[0].tolist()])
    got = logits(load_checkpoint(tmp_path / "fp8"), Select.TOPK)[0]
    torch.testing.assert_close(got, wanted, atol=1e-4, rtol=0)
