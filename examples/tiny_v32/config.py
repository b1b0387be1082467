"""The geometry of the small model: every mechanism of DeepSeek-V3.2, 5.6 million parameters."""

from dataclasses import asdict, dataclass
from typing import Any, ClassVar


@dataclass(frozen=True)
class TinyConfig:
    """Field names and meanings are those of ``DeepseekV32Config``; sizes count elements.

    RoPE is plain (``rope_theta`` 10000, no YaRN): the context is trained, not stretched.
    """

    model_type: ClassVar[str] = "deepseek_v32"
    index_rope_interleaved: ClassVar[bool] = False  # else the indexer rotates halves

    vocab_size: int = 1536
    hidden_size: int = 256
    intermediate_size: int = 512
    moe_intermediate_size: int = 32
    num_hidden_layers: int = 5
    first_k_dense_replace: int = 2
    num_attention_heads: int = 8
    n_shared_experts: int = 1
    n_routed_experts: int = 16
    num_experts_per_tok: int = 4
    n_group: int = 4
    topk_group: int = 2
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 2.5
    q_lora_rank: int = 96
    kv_lora_rank: int = 64
    qk_nope_head_dim: int = 32
    qk_rope_head_dim: int = 16
    v_head_dim: int = 32
    index_topk: int = 64
    index_n_heads: int = 16
    index_head_dim: int = 32
    num_nextn_predict_layers: int = 1
    max_position_embeddings: int = 2048
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    bos_token_id: int = 0
    eos_token_id: int = 1
    pad_token_id: int = 2

    @property
    def qk_head_dim(self) -> int:
        """Width of one query head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    def owns_indexer(self, layer: int) -> bool:
        """Whether the layer selects keys; else it attends to those that the last such one did."""
        return layer >= 0

    def to_hub(self) -> dict[str, Any]:
        """``config.json`` as the released model writes it."""
        return {
            "architectures": ["DeepseekV32ForCausalLM"],
            "model_type": self.model_type,
            **asdict(self),
            "num_key_value_heads": self.num_attention_heads,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "ep_size": 1,
            "hidden_act": "silu",
            "initializer_range": 0.02,
            "moe_layer_freq": 1,
            "rope_scaling": None,
            "scoring_func": "sigmoid",
            "tie_word_embeddings": False,
            "topk_method": "noaux_tc",
            "torch_dtype": "bfloat16",
            "use_cache": True,
        }
