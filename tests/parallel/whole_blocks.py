"""A small model whose sizes two ranks share in whole FP8 blocks."""

from pathlib import Path

from examples.small_models.models import save_hub, tiny_config, tiny_model


def save_whole_blocks(folder: Path) -> None:
    """Write the model in the published layout, with random weights.

    Kernels for Hopper take what each of two ranks has of it.
    """
    config = tiny_config(
        2,
        first_k_dense_replace=1,
        hidden_size=256,
        num_attention_heads=4,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        intermediate_size=512,
        moe_intermediate_size=256,
        index_n_heads=16,
        index_head_dim=128,
        kv_lora_rank=512,
        q_lora_rank=256,
    )
    save_hub(tiny_model(config), folder)
