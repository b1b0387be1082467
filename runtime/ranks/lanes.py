"""Steps of all lanes cut into those of each.

Experts take the tokens of all lanes, so every lane computes as many
(:mod:`dsa_compile.runtime.execution.step_shape`). A lane without requests runs a step of idle rows
alone, as collectives need all ranks.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from dsa_compile.runtime.execution.batch import Batch
from dsa_compile.runtime.execution.prompt_rows import PromptRows
from dsa_compile.runtime.execution.runner import StepInputs


def lane_steps(inputs: StepInputs, lanes: int, max_num_seqs: int) -> list[StepInputs]:
    """The step of each lane as it is, which may be empty.

    Args:
        inputs: of all lanes; requests of a lane follow one another, and lane n has the rows of the
            scheduler from ``n * max_num_seqs`` on.
        lanes: how many.
        max_num_seqs: rows of one.

    Returns:
        For each lane its requests under rows from 0 on.
    """
    batch = inputs.batch
    bounds = _bounds(batch.request_rows, lanes, max_num_seqs)
    tokens = batch.cu_seqlens[bounds]
    yields = _bounds(np.asarray(inputs.rows, np.int64), lanes, max_num_seqs)
    found = []
    for lane in range(lanes):
        of_lane = slice(bounds[lane], bounds[lane + 1])
        yielding = slice(yields[lane], yields[lane + 1])
        found.append(
            replace(
                inputs,
                batch=_requests(batch, of_lane, lane * max_num_seqs),
                rows=[row - lane * max_num_seqs for row in inputs.rows[yielding]],
                states=inputs.states[yielding],
                counts=inputs.counts[yielding],
                max_new=inputs.max_new[yielding],
                next_ids=inputs.next_ids[of_lane],
                prompt=_prompt(inputs.prompt, int(tokens[lane]), int(tokens[lane + 1])),
            )
        )
    return found


def _bounds(rows: NDArray[np.integer], lanes: int, max_num_seqs: int) -> NDArray[np.int64]:
    """First row of each lane among rows in the order of lanes, and the end; int64 [lanes + 1]."""
    return np.searchsorted(rows, np.arange(lanes + 1) * max_num_seqs)


def _requests(batch: Batch, chosen: slice, first_row: int) -> Batch:
    """Some requests of a batch, in a batch of their own."""
    start, end = (int(batch.cu_seqlens[at]) for at in (chosen.start, chosen.stop))
    wanted = batch.logit_rows[(batch.logit_rows >= start) & (batch.logit_rows < end)]
    return Batch(
        input_ids=batch.input_ids[start:end],
        positions=batch.positions[start:end],
        slot_mapping=batch.slot_mapping[start:end],
        block_tables=batch.block_tables[chosen],
        cu_seqlens=batch.cu_seqlens[chosen.start : chosen.stop + 1] - start,
        context_lens=batch.context_lens[chosen],
        logit_rows=wanted - start,
        request_rows=batch.request_rows[chosen] - first_row,
        tokens_each=batch.tokens_each,
    )


def _prompt(prompt: PromptRows | None, start: int, end: int) -> PromptRows | None:
    """The rows of a lane, whose tokens are those from ``start`` to ``end``; None if it has none.
    Only the first rank needs to know the requests of the rows."""
    if prompt is None:
        return None
    first, last = np.searchsorted(prompt.rows, (start, end))
    if first == last:
        return None
    rows, targets = prompt.rows[first:last] - start, prompt.targets[first:last]
    alternatives: Sequence[int] = prompt.alternatives[first:last]
    return PromptRows(rows, targets, alternatives, ())
