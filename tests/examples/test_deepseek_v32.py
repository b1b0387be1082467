"""examples/deepseek_v32 is the released geometry, as the benchmarks and transformers have it."""

import json
from pathlib import Path

import pytest
from transformers import AutoConfig

from dsa_compile.measure.step.released import CONFIG

EXAMPLE = Path(__file__).parents[2] / "examples" / "deepseek_v32"
# What transformers' own class takes where a configuration says nothing.
SIZES = (
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "num_hidden_layers",
    "first_k_dense_replace",
    "num_attention_heads",
    "n_routed_experts",
    "num_experts_per_tok",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "index_topk",
    "index_n_heads",
    "index_head_dim",
    "vocab_size",
    "max_position_embeddings",
)


def test_it_is_what_the_benchmarks_take() -> None:
    assert json.loads((EXAMPLE / "config.json").read_text(encoding="utf-8")) == CONFIG


@pytest.mark.parametrize("name", SIZES)
def test_it_is_what_transformers_takes_by_default(name: str) -> None:
    config = AutoConfig.from_pretrained(EXAMPLE)
    assert getattr(config, name) == getattr(type(config)(), name)
