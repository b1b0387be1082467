"""The parts of a reference model as modules to trace: embedding and tables, a layer, the head.

None of them takes a cache: positions already carry offsets.
"""

from typing import Any

import torch
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import MtpLayer


class Embed(torch.nn.Module):
    """Module of what precedes the reference model's first layer, without cache or padding."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.embed_tokens = model.model.embed_tokens
        self.rotary_emb = model.model.rotary_emb
        self.config = model.config

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Token ids and positions, int64 [B, S], to hidden [B, S, D], mask, cos and sin."""
        return _opened(self, input_ids, position_ids)


class Draft(torch.nn.Module):
    """Module of what precedes the decoder layer of a multi-token-prediction (MTP) layer."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.embed_tokens = model.model.embed_tokens
        self.rotary_emb = model.model.rotary_emb
        self.norm = model.model.norm
        self.config = model.config
        # Its decoder layer is traced as any other layer is, and the norm after that with the head.
        norm = type(self.norm)
        self.layer = MtpLayer(model.config, _NoLayer, norm, layer_idx=0, use_post_norm=False)

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Tokens and the states at the positions before them to what the decoder layer takes.

        Args:
            input_ids: int64 [B, S], the token that follows each position.
            position_ids: int64 [B, S].
            hidden: [B, S, D], what the last layer returned for each position.

        Returns:
            As of :class:`Embed`.
        """
        embedded, mask, cos, sin = _opened(self, input_ids, position_ids)
        joined = self.layer(
            embedded,
            self.norm(hidden),
            position_embeddings=(cos, sin),
            attention_mask=mask,
            position_ids=position_ids,
            past_key_values=None,
        )
        return joined, mask, cos, sin


def _opened(
    part: Any, input_ids: torch.Tensor, position_ids: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Embedded tokens, causal mask and RoPE tables, by the modules of ``part``."""
    hidden = part.embed_tokens(input_ids)
    mask = create_causal_mask(
        config=part.config,
        inputs_embeds=hidden,
        attention_mask=None,
        past_key_values=None,
        position_ids=position_ids,
        allow_is_causal_skip=False,
    )
    cos, sin = part.rotary_emb(hidden, position_ids=position_ids)
    return hidden, mask, cos, sin


class _NoLayer(torch.nn.Module):
    """Returns what a decoder layer would be given."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()

    def forward(self, hidden: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return hidden


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


class SelectingLayer(Layer):
    """A decoder layer that hands on which keys its indexer selected."""

    def forward(  # type: ignore[override]
        self, hidden: torch.Tensor, mask: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run :class:`Layer`; also returns positions of keys, int32 [B, S, min(topk, S)]."""
        result, selected = self.layer(
            hidden, attention_mask=mask, position_embeddings=(cos, sin), use_cache=False
        )
        return result, selected


class ReusingLayer(Layer):
    """A decoder layer without an indexer, which attends to keys that were selected before."""

    def forward(  # type: ignore[override]
        self,
        hidden: torch.Tensor,
        mask: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        selected: torch.Tensor,
    ) -> torch.Tensor:
        """Run :class:`Layer`; also takes positions of keys, int32 [B, S, topk]."""
        result: torch.Tensor = self.layer(
            hidden,
            attention_mask=mask,
            position_embeddings=(cos, sin),
            use_cache=False,
            prev_topk_indices=selected,
        )[0]
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
