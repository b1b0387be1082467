"""A runner whose logits are given, for what the runtime makes of logits."""

from typing import Any

import torch
from torch import Tensor

from dsa_compile.runtime.execution.batch import Batch
from dsa_compile.verify.execution.exact_runner import ExactRunner


class ScriptedRunner(ExactRunner):
    """A runner that computes nothing: logits depend on a token's position alone.

    Args:
        *args: as for :class:`ExactRunner`.
        logits: fp32 ``[P, V]``; those behind the first ``n`` tokens of a request are row ``n % P``.
        ends: the model's end tokens.
        **options: as for :class:`ExactRunner`.
    """

    def __init__(self, *args: Any, logits: Tensor, ends: tuple[int, ...], **options: Any) -> None:
        super().__init__(*args, **options)
        self._logits = logits
        self.eos_token_ids = ends

    def forward(self, batch: Batch) -> Tensor:
        """The logits of a step, fp32 ``[N, V]``."""
        counts = torch.from_numpy(batch.positions[batch.logit_rows]) + 1
        return self._logits[counts % len(self._logits)]
