"""Steps that the model has computed, and whose tokens the host is still to choose.

Between the two, ranks send what the choice depends on to the first one, and get what it has chosen.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dsa_compile.runtime.execution.draft_rows import DraftedRows
from dsa_compile.runtime.execution.host_choice import CheckedRows, checked_rows
from dsa_compile.runtime.execution.runner import StepInputs


@dataclass(frozen=True, slots=True, eq=False)
class OpenStep:
    """A step without its tokens.

    Args:
        inputs: the step; of another rank's requests without states.
        rows: of the step, W wide.
        drafts: int64 ``[Y, W - 1]``, those that were checked.
        logits: ``[Y * W, V]``, of every row of the grid.
        values: of the model's step, by name.
        variant: of that step.
    """

    inputs: StepInputs
    rows: DraftedRows
    drafts: Tensor
    logits: Tensor
    values: dict[str, Any]
    variant: str

    def checked(self) -> CheckedRows:
        """Rows that the tokens are chosen from; waits for the step."""
        return checked_rows(self.inputs.max_new, self.rows.width, self.drafts, self.logits)
