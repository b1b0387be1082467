"""Configurations of small models that take every branch of the released ones."""

from typing import Any

from transformers import AXK2Config, DeepseekV32Config, GlmMoeDsaConfig


def tiny_config(num_hidden_layers: int = 4, **overrides: Any) -> DeepseekV32Config:
    """DeepSeek-V3.2 at a size that runs in milliseconds and still takes every branch of it.

    Two dense layers come first, the rest are mixtures of experts (``first_k_dense_replace`` or
    ``mlp_layer_types`` change that). Sixteen index heads make exact-zero ties of the index scores
    rare; ``index_topk`` is 16, so prompts beyond 16 tokens really select.
    """
    changes = {"rope_parameters": yarn_parameters(), **overrides}
    return DeepseekV32Config(**_tiny_sizes(num_hidden_layers, changes))


def tiny_glm_config(num_hidden_layers: int = 6, **overrides: Any) -> GlmMoeDsaConfig:
    """GLM-5.2 at the size of :func:`tiny_config`.

    Keys and values differ in width, experts are in one group, and of six layers the third, the
    fourth and the last attend to keys that an earlier one selected.
    """
    changes: dict[str, Any] = {
        "n_group": 1,
        "topk_group": 1,
        "qk_nope_head_dim": 24,
        "v_head_dim": 32,
    }
    changes |= {"rms_norm_eps": 1e-5, "index_topk_freq": 3, "index_skip_topk_offset": 2}
    return GlmMoeDsaConfig(**_tiny_sizes(num_hidden_layers, changes | overrides))


def tiny_axk2_config(num_hidden_layers: int = 4, **overrides: Any) -> AXK2Config:
    """A.X-K2 at the size of :func:`tiny_config`, with groups of experts."""
    changes: dict[str, Any] = {"gated_norm_rank": 8, "qk_nope_head_dim": 24, **overrides}
    return AXK2Config(**_tiny_sizes(num_hidden_layers, changes))


def tiny_mistral_config(num_hidden_layers: int = 4, **overrides: Any) -> Any:
    """Mistral-Large-4 with a part for text of the size of :func:`tiny_config`.

    The last layer of four rotates nothing. What sees images is as small as can be.

    Raises:
        ImportError: the installed transformers has no such model.
    """
    from transformers import MistralLarge4Config

    changes: dict[str, Any] = {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
    text = _tiny_sizes(num_hidden_layers, changes | overrides)
    del text["q_lora_rank"]
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "image_size": 32, "patch_size": 16}
    return MistralLarge4Config(
        text_config=text, vision_config={"model_type": "pixtral", "hidden_act": "silu", **vision}
    )


def _tiny_sizes(num_hidden_layers: int, changes: dict[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {
        "num_hidden_layers": num_hidden_layers,
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 192,
        "moe_intermediate_size": 64,
        "num_attention_heads": 8,
        "n_shared_experts": 1,
        "n_routed_experts": 16,
        "num_experts_per_tok": 4,
        "n_group": 4,
        "topk_group": 2,
        "q_lora_rank": 48,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "index_topk": 16,
        "index_head_dim": 32,
        "index_n_heads": 16,
        "first_k_dense_replace": 2,
        "max_position_embeddings": 4096,
    }
    values.update(changes)
    values.setdefault("num_key_value_heads", values["num_attention_heads"])
    return values


def yarn_parameters() -> dict[str, Any]:
    """The RoPE scaling of the released model."""
    return {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }
