"""The reference model of transformers over the very weights an artifact was compiled from.

None of the weights passes through the compiler's loader, so a fault of the loader shows in a
comparison (and :mod:`dsa_compile.measure.eval.loader_check` names the tensor). Numerics are fp32. The
functions import transformers when called.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsa_compile.facts.model_spec import ModelSpec
from dsa_compile.measure.eval.hf_drafts import DraftStates, HfDrafts
from dsa_compile.measure.eval.reference_model import load_reference

NAME = "transformers, fp32"


class HfModel:
    """The reference model in fp32, in eval mode.

    Args:
        model_dir: config.json and weights.
        spec: the geometry of the artifact.

    Raises:
        UserError: transformers is not installed or refuses the model, or the weights are not those
            of ``spec``.
    """

    def __init__(self, model_dir: Path, spec: ModelSpec) -> None:
        self._model = load_reference(model_dir, spec)
        self._model_dir, self._spec = model_dir, spec

    def logits(
        self, sequences: Sequence[Sequence[int]], tails: Sequence[int] | None = None
    ) -> Iterator[Tensor]:
        """See :class:`~dsa_compile.measure.eval.probe.LanguageModel`; one sequence at a time."""
        for index, sequence in enumerate(sequences):
            tail = len(sequence) if tails is None else tails[index]
            with torch.no_grad():
                output = self._model(torch.tensor([list(sequence)]), use_cache=False)
            yield output.logits[0, len(sequence) - tail :].float()

    def residuals(self, sequence: Sequence[int]) -> list[Tensor]:
        """The residual stream of T tokens before the first layer and after each, fp32 [T, H]."""
        found: list[Tensor] = []

        def note(module: Any, inputs: Any, output: Any) -> None:
            found.append(output[0] if isinstance(output, tuple) else output)

        hooks = [
            module.register_forward_hook(note)
            for module in (self._model.model.embed_tokens, *self._model.model.layers)
        ]
        with torch.no_grad():
            self._model(torch.tensor([list(sequence)]), use_cache=False)
        for hook in hooks:
            hook.remove()
        return [states[0].float() for states in found]

    def drafts(self, sequence: Sequence[int], hidden: Tensor) -> list[DraftStates]:
        """Two passes of the model's MTP layer over T tokens, the second from what the first left.

        Every position is given its own token: which one it drafts from is the caller's business.
        The second pass attends to what the first selected where the model's deeper drafts do.

        Args:
            sequence: T token ids.
            hidden: fp32 ``[T, H]``, the residual stream after the last layer.

        Raises:
            CheckpointError: the layer's weights are not stored.
        """
        tokens = torch.tensor(sequence)
        with torch.no_grad():
            first = self._drafts.run(tokens, self._model.model.norm(hidden))
        selected = first.selected if self._drafts.shares_selection else None
        return [first, self._drafts.run(tokens, first.normed, selected)]

    @cached_property
    def _drafts(self) -> HfDrafts:
        return HfDrafts(self._model_dir, self._spec, self._model)

    def generate(self, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
        """``count`` likeliest tokens after each prompt; prompts of one length share a batch."""
        groups: dict[int, list[int]] = {}
        for index, prompt in enumerate(prompts):
            groups.setdefault(len(prompt), []).append(index)
        found: dict[int, list[int]] = {}
        for length, members in groups.items():
            ids = torch.tensor([list(prompts[index]) for index in members])
            with torch.no_grad():
                output = self._model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=count,
                    do_sample=False,
                    eos_token_id=None,
                    pad_token_id=0,
                )
            found.update(zip(members, output[:, length:].tolist(), strict=True))
        return [found[index] for index in range(len(prompts))]
