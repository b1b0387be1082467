"""A record of the drafts that the steps of a loaded runner check, in CUDA graphs, too."""

from typing import Any

import torch
from torch import Tensor

from dsa_compile.runtime.execution.draft_rows import DraftedRows
from dsa_compile.runtime.execution.drafting_runner import DraftingRunner
from dsa_compile.verify.execution.exact_drafting_runner import CheckedDrafts

_STEPS = 2048  # that are remembered
_NOBODY = -1


class RecordedDrafts:
    """Drafts that a runner checks from now on, written where its tokens are.

    A step in a CUDA graph runs no Python, so the writing is a part of the step; graphs that the
    runner has captured are captured anew with it.

    Args:
        runner: loaded; its draft plans draft.
    """

    def __init__(self, runner: DraftingRunner) -> None:
        self._right = runner._drafts_and_model
        plan = runner._sizes if runner._padded.captured else None
        rows = max(runner.max_running, *(plan.rows if plan is not None else (0,)))
        shape = (_STEPS, rows, 2 + runner.num_drafts)
        self._log = torch.full(shape, _NOBODY, dtype=torch.int64, device=runner.device)
        self._next = torch.zeros(1, dtype=torch.int64, device=runner.device)
        vars(runner)["_drafts_and_model"] = self._drafts_and_model
        if plan is not None:
            runner.drop_graphs()
            runner.capture(plan)
            self._log.fill_(_NOBODY)  # steps that ran before they were captured
            self._next.zero_()

    @property
    def checked(self) -> list[CheckedDrafts]:
        """The drafts, perhaps none, of each request in every step so far; waits for the device."""
        found = self._log[: int(self._next)].flatten(0, 1).tolist()
        return [
            CheckedDrafts(end, tuple(drafts[: max(most - 1, 0)]))
            for end, most, *drafts in found
            if end != _NOBODY
        ]

    def _drafts_and_model(
        self, rows: DraftedRows, variant: str, *, flat: bool
    ) -> tuple[Tensor, dict[str, Any]]:
        drafts, values = self._right(rows, variant, flat=flat)
        said = torch.cat([rows.start[:, None], rows.max_new[:, None], drafts], 1)
        self._log[:, : len(said), : said.shape[1]].index_copy_(0, self._next, said[None])
        self._next.add_(1).clamp_(max=_STEPS - 1)
        return drafts, values
