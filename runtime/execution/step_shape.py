"""Sizes of a step that all lanes share, and what pads the step of one lane up to them.

Experts take the tokens of all lanes, so whatever runs a layer with experts has as many rows on each
lane: the model, first drafts, and every depth of deeper ones. What pads them belongs to nobody:
tokens that write no cache row, and requests with an empty context.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from dsa_compile.runtime.execution.batch import Batch
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


def pad_tokens(batch: Batch, tokens: int) -> Batch:
    """Put tokens of no request behind those of a batch.

    Args:
        batch: perhaps without any request; it gets one of no tokens then, as no kernel takes none.
        tokens: that it is to have.
    """
    missing = tokens - batch.num_tokens
    batch = replace(
        batch,
        input_ids=np.pad(batch.input_ids, (0, missing)),
        positions=np.pad(batch.positions, (0, missing)),
        slot_mapping=np.pad(batch.slot_mapping, (0, missing), constant_values=-1),
    )
    return batch if batch.num_requests else pad_requests(batch, 1, np.zeros(2, np.int32))


def pad_requests(batch: Batch, requests: int, cu_seqlens: NDArray[np.int32]) -> Batch:
    """Put requests with an empty context behind those of a batch.

    Args:
        batch: any.
        requests: that it is to have, R.
        cu_seqlens: int32 ``[R + 1]``, where the tokens of each start.
    """
    missing = requests - batch.num_requests
    return replace(
        batch,
        block_tables=np.pad(batch.block_tables, ((0, missing), (0, 0)), constant_values=-1),
        cu_seqlens=cu_seqlens,
        context_lens=np.pad(batch.context_lens, (0, missing)),
        request_rows=np.pad(batch.request_rows, (0, missing), constant_values=-1),
    )
