"""The parts of a reference model whose layers may share latents, as modules to trace.

Apart from :mod:`dsa_compile.frontend.modules`, since older versions of transformers have none of
what is imported here.
"""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModel, PreTrainedConfig
from transformers.cache_utils import KVSharingDict

from dsa_compile.facts.model_spec import LayerKind
from dsa_compile.frontend.modules import Head, Layer


class SharingLayer(Layer):
    """A decoder layer of a model whose layers may share latents as well as selections.

    Args:
        layer: of the reference model.
        kind: of the layer: whose selection and latents it uses.
        takes: names of what :meth:`forward` is given after positions.
    """

    def __init__(self, layer: Any, kind: LayerKind, takes: Sequence[str]) -> None:
        super().__init__(layer)
        self._kind, self._takes = kind, takes

    def forward(  # type: ignore[override]
        self,
        hidden: torch.Tensor,
        mask: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        positions: torch.Tensor,
        first: torch.Tensor | None = None,
        second: torch.Tensor | None = None,
        third: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Run the layer; also returns the keys that it selected, and the latents that it hands on.

        Args:
            hidden: [B, S, D].
            mask: causal, bool [B, 1, S, S].
            cos: [B, S, D_rope].
            sin: as ``cos``.
            positions: int64 [B, S].
            first: of another layer, what the first of ``takes`` names: positions of keys, int32
                [B, S, topk]; latents [B, S, R]; keys that were rotated with them [B, S, D_rope].
            second: likewise.
            third: likewise.
        """
        given: dict[str, Any] = dict(zip(self._takes, (first, second, third), strict=False))
        states = KVSharingDict()
        if self._kind.latents == "borrowed":
            latents, *keys = (value for name, value in given.items() if name != "selected")
            # a layer that rotates nothing has keys of no width
            key = keys[0] if keys else latents[..., :0]
            states["rope" if self._kind.rope else "nope"] = (_one_head(latents), _one_head(key))
        cache = _Latents()
        result, selected = self.layer(
            hidden,
            shared_kv_states=states,
            attention_mask=mask,
            position_embeddings=(cos, sin),
            position_ids=positions,
            past_key_values=cache,
            prev_topk_indices=given.get("selected"),
        )
        made: tuple[torch.Tensor, ...] = (selected,) if self._kind.indexer else ()
        if self._kind.latents == "shared":
            made += tuple(_no_heads(x) for x in cache.seen[: 2 if self._kind.rope else 1])
        return result, *made


def _one_head(x: torch.Tensor) -> torch.Tensor:
    """[B, S, D] to [B, 1, S, D]."""
    return x.view(x.shape[0], 1, *x.shape[1:])


def _no_heads(x: torch.Tensor) -> torch.Tensor:
    """[B, 1, S, D] to [B, S, D]."""
    return x.transpose(1, 2).squeeze(2)


class _Latents:
    """A cache that keeps what a layer puts into it, and holds nothing before."""

    def __init__(self) -> None:
        self.seen: tuple[torch.Tensor, ...] = ()

    def update(self, *latents: torch.Tensor, **_: Any) -> tuple[torch.Tensor, ...]:
        self.seen = latents[:2]
        return self.seen

    def update_indexer(self, keys: torch.Tensor, layer: int) -> torch.Tensor:
        return keys


class WithHead(torch.nn.Module):
    """A reference model of hidden states, and the head that the class of the whole puts on it."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__()
        self.config = config
        self.model = AutoModel.from_config(config)
        self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)


class CappedHead(Head):
    """A :class:`Head` whose logits tend to a limit on both sides."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.cap = model.config.final_logit_softcapping

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states [B, S, D] to logits [B, S, V], which are capped."""
        logits: torch.Tensor = torch.tanh(super().forward(hidden) / self.cap) * self.cap
        return logits
