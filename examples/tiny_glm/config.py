"""The geometry of the small GLM-5: reused selections, widths that the kernels for Hopper take."""

from dataclasses import dataclass
from typing import Any, ClassVar

from examples.tiny_v32.config import TinyConfig


@dataclass(frozen=True)
class TinyGlmConfig(TinyConfig):
    """Field names and meanings are those of ``GlmMoeDsaConfig``; sizes count elements.

    Latent rows, RoPE and index keys are as wide as in the released model, and every product has
    whole FP8 blocks. There is no MTP module: with it the checkpoint would be a third larger.
    """

    model_type: ClassVar[str] = "glm_moe_dsa"
    index_rope_interleaved: ClassVar[bool] = True

    intermediate_size: int = 256
    moe_intermediate_size: int = 128
    num_attention_heads: int = 4
    n_routed_experts: int = 8
    num_experts_per_tok: int = 2
    n_group: int = 1
    topk_group: int = 1
    q_lora_rank: int = 256
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    index_head_dim: int = 128
    index_topk_freq: int = 2
    index_skip_topk_offset: int = 2
    num_nextn_predict_layers: int = 0
    rms_norm_eps: float = 1e-5

    def owns_indexer(self, layer: int) -> bool:
        """As ``GlmMoeDsaConfig`` derives ``indexer_types``: here layers 0, 1 and 3."""
        return max(layer - self.index_skip_topk_offset + 1, 0) % self.index_topk_freq == 0

    def to_hub(self) -> dict[str, Any]:
        """``config.json`` as the released model writes it."""
        hub = super().to_hub()
        del hub["rope_scaling"]
        return {
            **hub,
            "architectures": ["GlmMoeDsaForCausalLM"],
            "qk_head_dim": self.qk_head_dim,
            "indexer_rope_interleave": True,
            "rope_interleave": True,
            "rope_parameters": {"rope_theta": hub.pop("rope_theta"), "rope_type": "default"},
        }
