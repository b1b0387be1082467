"""Sizes of a step that all lanes share; idle rows pad the step of one lane up to them.

Experts take the tokens of all lanes, so whatever runs a layer with experts has as many rows on each
lane: the model, first drafts, and every depth of deeper ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from dsa_compile.runtime.execution.draft_inputs import fits_padded
from dsa_compile.runtime.execution.runner import StepInputs

DEEPER_FROM = 3
"""Tokens that a request must want for a step to make deeper drafts: its last one, the first draft,
which the step before has left, and one behind it."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """Sizes of a step with drafts, alike on all lanes.

    Args:
        tokens: of the lane with the most.
        requests: likewise.
        width: the most tokens that any request may yield.
        drafting: the most requests that yield tokens, of the lanes that make deeper drafts; 0 if
            none does.
        even: whether every lane's step is one of requests that yield tokens with all they compute,
            or compute just one (:func:`~dsa_compile.runtime.execution.draft_inputs.fits_padded`).
    """

    tokens: int
    requests: int
    width: int
    drafting: int
    even: bool

    @classmethod
    def of(cls, steps: Sequence[StepInputs]) -> "StepShape":
        """The shape of the steps that lanes run together; of one lane, that of its step."""
        widths = [max(step.max_new, default=1) for step in steps]
        return cls(
            tokens=max(step.batch.num_tokens for step in steps),
            requests=max(step.batch.num_requests for step in steps),
            width=max(widths),
            drafting=max(
                len(step.rows) if width >= DEEPER_FROM else 0
                for step, width in zip(steps, widths, strict=True)
            ),
            even=all(map(fits_padded, steps)),
        )
