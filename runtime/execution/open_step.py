"""Steps that the model has computed, and whose tokens the host is still to choose.

Between the two, ranks send what the choice depends on to the first one, and get what it has chosen.
"""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from dsa_compile.ir.plan import LONG
from dsa_compile.runtime.execution.draft_rows import DraftedRows
from dsa_compile.runtime.execution.runner import StepInputs
from dsa_compile.runtime.sampling.host_choice import CheckedRows, checked_rows


@dataclass(frozen=True, slots=True, eq=False)
class OpenStep:
    """A step without its tokens.

    Args:
        inputs: the step; of another rank's requests without states.
        logits: ``[N, V]``, those that the batch wants; with drafts of every row of the grid,
            ``[Y * W, V]``.
        values: of the model's step, by name; empty where nobody looks at them.
        variant: of that step.
        rows: of a step with drafts, W wide.
        drafts: int64 ``[Y, W - 1]``, those that were checked.
    """

    inputs: StepInputs
    logits: Tensor
    values: dict[str, Any] = field(default_factory=dict)
    variant: str = LONG
    rows: DraftedRows | None = None
    drafts: Tensor | None = None

    def checked(self) -> CheckedRows:
        """Rows that the tokens are chosen from; waits for the step."""
        if self.rows is None or self.drafts is None:
            return CheckedRows(self.logits.float().cpu(), [()] * len(self.inputs.rows))
        return checked_rows(self.inputs.max_new, self.rows.width, self.drafts, self.logits)
