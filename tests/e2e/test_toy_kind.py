"""A fourth kind of layer is added without touching the package: one without an indexer.

Such layers attend to what the last indexer before them selected, and have no index cache.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DeepseekV32Config, DeepseekV32ForCausalLM

from dsa_compile.facts.model_spec import LayerKind
from dsa_compile.frontend.architectures import ARCHITECTURES, DEEPSEEK_V32, Traced, TracedLayer
from dsa_compile.frontend.model_checks import MODEL_TYPES
from dsa_compile.frontend.modules import Layer
from dsa_compile.lowering.compile_model import compile_model
from dsa_compile.runtime import Engine, SamplingParams
from examples.small_models.models import save_hf, tiny_config, tiny_model

LAYERS = {"mlp_layer_types": ["dense", "sparse", "sparse", "dense", "sparse", "sparse"]}
SHARED = {"indexer_types": ["full", "full", "shared", "shared", "full", "shared"]}
TOKENS = 8


class Slot:
    """Holds a selection on its way from one layer to others, int32 [B, S, topk]."""

    value: Tensor


class Reuse(nn.Module):
    """In the place of an indexer: what the last one selected."""

    def __init__(self, slot: Slot) -> None:
        super().__init__()
        self.slot = slot

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.slot.value


class ToyConfig(DeepseekV32Config):
    model_type = "toy_v32"


class ToyModel(DeepseekV32ForCausalLM):
    """The reference model with indexers in some layers alone."""

    config_class = ToyConfig
    # transformers looks for a decorator in the file of the class
    _can_set_experts_implementation = classmethod(lambda cls: True)

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        slot = Slot()
        for layer, type_ in zip(self.model.layers, config.indexer_types, strict=True):
            layer.slot = slot
            if type_ == "shared":
                layer.self_attn.indexer = Reuse(slot)
            else:
                layer.self_attn.indexer.register_forward_hook(
                    lambda module, args, selected: setattr(slot, "value", selected)
                )


class Selecting(Layer):
    def forward(self, hidden: Tensor, mask: Tensor, cos: Tensor, sin: Tensor) -> Any:
        return super().forward(hidden, mask, cos, sin), self.layer.slot.value


class Reusing(Layer):
    def forward(
        self, hidden: Tensor, mask: Tensor, cos: Tensor, sin: Tensor, selected: Tensor
    ) -> Any:
        self.layer.slot.value = selected
        return super().forward(hidden, mask, cos, sin)


TAKES = ("hidden", "causal_mask", "cos", "sin")
SELECTING = Traced(Selecting, TAKES, ("hidden", "selected"))
REUSING = Traced(Reusing, (*TAKES, "selected"), ("hidden",))


def layer(name: str, mlp: str, type_: str) -> TracedLayer:
    kind = LayerKind(name, "experts" if mlp == "sparse" else "dense", indexer=type_ == "full")
    fields = {"mlp_layer_types": mlp, "indexer_types": type_}
    return TracedLayer(kind, fields, SELECTING if kind.indexer else REUSING)


TOY = replace(
    DEEPSEEK_V32,
    model_type="toy_v32",
    config=ToyConfig,
    model=ToyModel,
    layers=(
        layer("dense", "dense", "full"),
        layer("moe", "sparse", "full"),
        layer("dense_reuse", "dense", "shared"),
        layer("moe_reuse", "sparse", "shared"),
    ),
    extra_fields=("indexer_types",),
)


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, ToyModel]]:
    """A model directory and the model, while the architecture is known."""
    ARCHITECTURES[TOY.model_type] = TOY
    MODEL_TYPES[TOY.model_type] = "a toy"
    plain = tiny_config(6, **LAYERS)
    with torch.random.fork_rng():
        config = ToyConfig(**{**plain.to_dict(), **SHARED, "model_type": TOY.model_type})
        model = ToyModel._from_config(config, attn_implementation="sdpa").eval()
    model.load_state_dict(tiny_model(plain).state_dict(), strict=False)
    path = tmp_path_factory.mktemp("toy") / "model"
    save_hf(model, path, fused_experts=True)
    yield path, model
    del ARCHITECTURES[TOY.model_type], MODEL_TYPES[TOY.model_type]


def greedy(model: ToyModel, prompt: list[int]) -> list[int]:
    ids = list(prompt)
    for _ in range(TOKENS):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.slow
def test_tokens_are_the_references(toy: tuple[Path, ToyModel], tmp_path: Path) -> None:
    path, model = toy
    result = compile_model(path, tmp_path / "artifact")
    caches = {kind: [c.key for c in found] for kind, found in result.manifest.caches.items()}
    alone, both = ["latent_cache"], ["latent_cache", "index_cache"]
    assert caches == {"dense": both, "moe": both, "dense_reuse": alone, "moe_reuse": alone}
    generator = torch.Generator().manual_seed(0)
    # the first never fills the selection of 16 keys, the others go beyond it
    prompts = [torch.randint(0, 512, (n,), generator=generator).tolist() for n in (5, 23, 60)]
    engine = Engine.load(tmp_path / "artifact")
    params = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
    found = [list(output.token_ids) for output in engine.generate(prompts, params)]
    assert found == [greedy(model, prompt) for prompt in prompts]


@pytest.mark.slow
def test_every_promise_of_fp8_holds(toy: tuple[Path, ToyModel], tmp_path: Path) -> None:
    made = compile_model(toy[0], tmp_path / "a", recipe="fp8", weights="none")
    promised = {record.name: record.expected for record in made.program.records}
    of_indexers = ("quantize_indexer", "fuse_attention_inputs", "split_short_long")
    assert [promised[name] for name in of_indexers] == [SHARED["indexer_types"].count("full")] * 3
    assert promised["quantize_latent_cache"] == len(made.manifest.layers)
