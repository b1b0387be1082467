"""The reference model, built without memory, one decoder layer of each kind.

Everything is made under a fake-tensor mode: a full-geometry layer costs nothing, and the device
that tracing bakes into ``arange`` or ``zeros`` is the one the graphs will run on.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import DeepseekV32Config
from transformers.masking_utils import create_causal_mask
from transformers.models.deepseek_v32.modeling_deepseek_v32 import (
    DeepseekV32ForCausalLM,
    DeepseekV32RotaryEmbedding,
)

from dsa_compile.errors import ConfigError
from dsa_compile.model_spec import ModelSpec
from dsa_compile.weights.canonical import compute_dtype

# transformers' names of the layer kinds
_MLP_TYPES = {"dense": "dense", "moe": "sparse"}


class Embed(torch.nn.Module):
    """What the reference model does before its first layer, without cache or padding."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.embed_tokens = model.embed_tokens
        self.rotary_emb = model.rotary_emb
        self.config = model.config

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Token ids and positions, int64 [B, S], to hidden [B, S, D], mask, cos and sin."""
        hidden = self.embed_tokens(input_ids)
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=hidden,
            attention_mask=None,
            past_key_values=None,
            position_ids=position_ids,
            allow_is_causal_skip=False,
        )
        cos, sin = self.rotary_emb(hidden, position_ids=position_ids)
        return hidden, mask, cos, sin


class Layer(torch.nn.Module):
    """One decoder layer without cache."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def forward(
        self, hidden: torch.Tensor, mask: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        """Hidden states [B, S, D], causal mask bool [B, 1, S, S], RoPE tables [B, S, D_rope]."""
        result: torch.Tensor = self.layer(
            hidden, attention_mask=mask, position_embeddings=(cos, sin), use_cache=False
        )
        return result


class Head(torch.nn.Module):
    """The final norm and the projection to the vocabulary."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.norm = model.model.norm
        self.lm_head = model.lm_head

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states [B, S, D] to logits [B, S, V]."""
        logits: torch.Tensor = self.lm_head(self.norm(hidden))
        return logits


@dataclass(frozen=True)
class Reference:
    """Modules to trace, by region kind, and the fake mode they live in."""

    modules: dict[str, torch.nn.Module]
    mode: FakeTensorMode
    inv_freq: torch.Tensor  # real, fp32 [qk_rope_head_dim / 2]


def load_config(raw: dict[str, Any]) -> DeepseekV32Config:
    """The configuration as transformers understands it: defaults filled in, old names mapped.

    Raises:
        ConfigError: transformers refuses it.
    """
    try:
        return DeepseekV32Config(**raw)
    # the strict dataclass raises its own classes and, from rope validation, KeyError
    except Exception as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"config.json: transformers refuses it: {reason}") from None


def build_reference(
    config: DeepseekV32Config, spec: ModelSpec, kinds: tuple[str, ...], dtype: torch.dtype
) -> Reference:
    """Instantiate one layer of each of ``kinds`` at full geometry, holding no memory.

    Parameters get the dtypes the reference keeps them in: ``dtype``, and fp32 for those that
    :func:`dsa_compile.weights.canonical.compute_dtype` names.
    """
    small = DeepseekV32Config(
        **{
            **config.to_dict(),
            "num_hidden_layers": len(kinds),
            "mlp_layer_types": [_MLP_TYPES[kind] for kind in kinds],
            "layer_types": None,
            "pad_token_id": None,  # matters to training alone, and may lie outside the vocabulary
        }
    )
    # scaled_dot_product_attention and the grouped GEMM leave short, regular graphs; the eager
    # experts loop over data and cannot be exported
    small._attn_implementation = "sdpa"
    small._experts_implementation = "grouped_mm"
    inv_freq = DeepseekV32RotaryEmbedding(small).inv_freq.detach().clone().float()
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        model = DeepseekV32ForCausalLM(small).eval()
        for name, parameter in model.named_parameters():
            parameter.data = parameter.data.to(compute_dtype(name, dtype))
    modules: dict[str, torch.nn.Module] = {"embed": Embed(model.model), "head": Head(model)}
    modules |= {kind: Layer(layer) for kind, layer in zip(kinds, model.model.layers, strict=True)}
    return Reference(modules, mode, inv_freq)
