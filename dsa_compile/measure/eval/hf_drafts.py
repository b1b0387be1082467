"""The multi-token-prediction (MTP) layer of transformers over the stored weights, in fp32.

Its parameters are read by :class:`~dsa_compile.measure.eval.stored_weights.StoredWeights`, as
transformers loads none of them. The functions import transformers when called.
"""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsa_compile.errors import CheckpointError
from dsa_compile.facts.model_spec import ModelSpec
from dsa_compile.measure.eval.stored_weights import StoredWeights


@dataclass(frozen=True)
class DraftStates:
    """States and logits that one pass of the layer makes of T tokens, all fp32.

    Attributes:
        joined: ``[T, H]``, what its decoder layer is given.
        hidden: ``[T, H]``, what that returns.
        normed: ``[T, H]``, that after the norm of the layer's head; a deeper draft takes it.
        logits: ``[T, V]``.
        selected: int32 ``[T, K]``, the positions that its attention was given, visible or not; None
            of models that hand on none.
    """

    joined: Tensor
    hidden: Tensor
    normed: Tensor
    logits: Tensor
    selected: Tensor | None


class HfDrafts:
    """The MTP layer of a model.

    Args:
        model_dir: with the layer's weights.
        spec: of a model that has one.
        model: transformers' model over the same directory; embedding, RoPE and head are its own.

    Raises:
        CheckpointError: a weight of the layer is missing or misshapen.
    """

    def __init__(self, model_dir: Path, spec: ModelSpec, model: Any) -> None:
        from transformers.modeling_layers import MtpLayer

        from dsa_compile.frontend.architectures import ARCHITECTURES

        number = spec.mtp_layer
        assert number is not None, "see ModelSpec.mtp_layer"
        self._model = model
        block, norm = type(model.model.layers[0]), type(model.model.norm)

        def layer(kind: str) -> Any:
            config = copy.deepcopy(model.config)  # the kind may be one that no layer of it has
            for name, entry in ARCHITECTURES[spec.model_type].layer(kind).config.items():
                setattr(config, name, [entry])
            with torch.random.fork_rng():
                return MtpLayer(config, block, norm, layer_idx=0).float().eval()

        self._layer = layer(spec.draft_kind().name)
        stored = StoredWeights(model_dir, spec.quantization.block if spec.quantization else None)
        for name, tensor in self._layer.state_dict().items():
            part, _, rest = name.partition(".")
            own = {"mtp_block": rest, "post_norm": f"shared_head.norm.{rest}"}.get(part, name)
            value = stored.tensor(f"model.layers.{number}.{own}")
            if value.shape != tensor.shape:
                raise CheckpointError(
                    f"{model_dir}: 'model.layers.{number}.{own}' is stored as {list(value.shape)}, "
                    f"transformers wants {list(tensor.shape)}"
                )
            tensor.copy_(value)
        self._reusing = self._layer
        if spec.shared_draft_selection:
            self._reusing = layer(spec.draft_kind(deeper=True).name)
            names = self._reusing.state_dict().keys()
            mine = self._layer.state_dict().items()
            self._reusing.load_state_dict({name: it for name, it in mine if name in names})

    @property
    def shares_selection(self) -> bool:
        """Whether deeper drafts attend to what the first one selected."""
        return self._reusing is not self._layer

    @torch.no_grad()
    def run(self, tokens: Tensor, normed: Tensor, selected: Tensor | None = None) -> DraftStates:
        """Run the layer over a sequence.

        Args:
            tokens: int64 ``[T]``, the token that each position is given.
            normed: fp32 ``[T, H]``, the states before it, normed.
            selected: int32 ``[T, K]``, the positions to attend to as far as they are visible; None
                for those that the layer's own indexer selects.
        """
        from transformers.masking_utils import create_causal_mask

        inner = self._model.model
        embedded = inner.embed_tokens(tokens[None])
        positions = torch.arange(len(tokens))[None]
        mask = create_causal_mask(
            config=self._model.config,
            inputs_embeds=embedded,
            attention_mask=None,
            past_key_values=None,
            position_ids=positions,
            allow_is_causal_skip=False,
        )
        found: dict[str, Tensor] = {}
        layer = self._layer if selected is None else self._reusing
        block = layer.mtp_block

        def note(module: Any, inputs: Any, output: Any) -> Any:
            found["joined"] = inputs[0]
            found["hidden"] = output[0] if isinstance(output, tuple) else output
            if isinstance(output, tuple):
                found["selected"] = output[1]
            return found["hidden"]

        hook = block.register_forward_hook(note)
        try:
            given = {} if selected is None else {"prev_topk_indices": selected[None]}
            after = layer(
                embedded,
                normed[None],
                position_embeddings=inner.rotary_emb(embedded, position_ids=positions),
                attention_mask=mask,
                position_ids=positions,
                past_key_values=None,
                **given,
            )
        finally:
            hook.remove()
        logits = self._model.lm_head(after)
        return DraftStates(
            joined=found["joined"][0].float(),
            hidden=found["hidden"][0].float(),
            normed=after[0].float(),
            logits=logits[0].float(),
            selected=found["selected"][0] if "selected" in found else None,
        )
