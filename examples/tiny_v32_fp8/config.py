"""The geometry of the small DeepSeek-V3.2 that the kernels for Hopper take."""

from examples.tiny_v32.config import TinyConfig

# Latent rows, RoPE, heads and index keys are as wide as in the released model, and every product
# has whole FP8 blocks. 8.8 million parameters; with four heads the file would exceed 12 MB.
CONFIG = TinyConfig(
    num_hidden_layers=3,
    first_k_dense_replace=1,
    num_attention_heads=2,
    moe_intermediate_size=128,
    n_routed_experts=8,
    q_lora_rank=256,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    index_head_dim=128,
)
