"""Models compiled once for all end-to-end tests."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from dsa_compile.lowering.compile_model import compile_model
from examples.small_models.models import (
    dequantised_twin,
    save_hf,
    save_hub,
    tiny_axk2_config,
    tiny_config,
    tiny_glm_config,
    tiny_mistral_config,
    tiny_model,
)
from tests.trained import trained_model

# What varies: depth, where the dense layers are, routing, how many keys are kept, index heads, and
# the layout of the checkpoint.
CASES: dict[str, dict[str, Any]] = {
    "grouped-4-layers": {"num_hidden_layers": 4},
    "ungrouped-6-layers": {
        "num_hidden_layers": 6,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "index_topk": 64,
        "index_n_heads": 32,
    },
    "hub-fp8-5-layers": {
        "num_hidden_layers": 5,
        "mlp_layer_types": ["sparse", "dense", "sparse", "sparse", "dense"],
        "index_topk": 16,
        "hidden_size": 192,
        "kv_lora_rank": 72,
    },
}

# Other members of the family: the geometry, and what is different in it.
FAMILY: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "glm-reuse-6-layers": (
        tiny_glm_config,
        {
            "mlp_layer_types": ["dense", "dense", "sparse", "sparse", "sparse", "sparse"],
            "indexer_types": ["full", "shared", "full", "shared", "shared", "full"],
        },
    ),
    "glm-own-4-layers": (
        tiny_glm_config,
        {"num_hidden_layers": 4, "index_topk_freq": 1, "index_topk": 64, "index_n_heads": 32},
    ),
    "hub-fp8-glm-5-layers": (
        tiny_glm_config,
        {"num_hidden_layers": 5, "hidden_size": 192, "kv_lora_rank": 72, "n_group": 4},
    ),
    "axk2-grouped-4-layers": (tiny_axk2_config, {}),
    "axk2-light-6-layers": (
        tiny_axk2_config,
        {"num_hidden_layers": 6, "n_group": None, "topk_group": None, "index_topk": 64},
    ),
    "axk2-experts-first-3-layers": (
        tiny_axk2_config,
        {
            "num_hidden_layers": 3,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "hidden_size": 192,
            "v_head_dim": 32,
        },
    ),
    "mistral-own-4-layers": (tiny_mistral_config, {}),
    "mistral-reuse-6-layers": (
        tiny_mistral_config,
        {
            "num_hidden_layers": 6,
            "indexer_types": ["full", "shared", "full", "full", "shared", "full"],
            "no_rope_layers": [1, 0, 1, 0, 1, 0],
            "n_group": 4,
            "topk_group": 2,
            "index_topk": 64,
        },
    ),
    "mistral-latents-8-layers": (
        tiny_mistral_config,
        {
            "num_hidden_layers": 8,
            "mlp_layer_types": ["sparse", "dense"] * 4,
            "indexer_types": ["full", "full", "shared", "shared", "full", "full", "full", "shared"],
            "no_rope_layers": [1, 0, 1, 0, 1, 1, 1, 0],
            "kv_source_layers": [0, 1, 0, 1, 0, 5, 5, 1],
            "v_head_dim": 32,
        },
    ),
}


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """``trained(target, recipe)``: an artifact of the trained model, compiled at first use."""
    root = tmp_path_factory.mktemp("trained")

    def get(target: str, recipe: str) -> Path:
        path = root / f"{target}-{recipe}"
        if not path.exists():
            compile_model(trained_model(), path, target=target, recipe=recipe)
        return path

    return get


@dataclass(frozen=True)
class Case:
    """A reference model, its directory, and the artifact compiled from it."""

    name: str
    model: Any
    model_dir: Path
    artifact: Path

    @property
    def topk(self) -> int:
        return int(self.model.config.get_text_config().index_topk)

    def prompts(self, lengths: list[int], seed: int = 0) -> list[list[int]]:
        """Random prompts; ids below 3 are left to special tokens."""
        generator = torch.Generator().manual_seed(seed)
        vocab = self.model.config.get_text_config().vocab_size
        return [torch.randint(3, vocab, (n,), generator=generator).tolist() for n in lengths]

    def reference(self, prompt: list[int], count: int) -> list[int]:
        """Greedy tokens of the reference, one request at a time."""
        with torch.no_grad():
            out = self.model.generate(
                torch.tensor([prompt]),
                max_new_tokens=count,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        return list(out[0, len(prompt) :].tolist())


@pytest.fixture(scope="session")
def case(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    """``case(name)``: built at first use."""
    made: dict[str, Case] = {}

    def get(name: str) -> Case:
        if name not in made:
            root = tmp_path_factory.mktemp(name)
            make, changes = FAMILY.get(name) or (tiny_config, CASES[name])
            try:
                config = make(**changes)
            except ImportError as error:
                pytest.skip(f"transformers has no such model: {error}")
            model = tiny_model(config)
            if name.startswith("hub"):
                save_hub(model, root / "model")
                model = dequantised_twin(model)
            else:
                save_hf(model, root / "model")
            compile_model(root / "model", root / "artifact", block_size=16)
            made[name] = Case(name, model, root / "model", root / "artifact")
        return made[name]

    return get
