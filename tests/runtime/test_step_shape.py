"""The shape that lanes give a step together, by hand and for random steps."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsa_compile.runtime import SamplingParams
from dsa_compile.runtime.execution.batch import Batch
from dsa_compile.runtime.execution.draft_inputs import nobodys_options, ragged_inputs
from dsa_compile.runtime.execution.draft_rows import (
    DraftedRows,
    RowState,
    corrected_rows,
    deeper_rows,
    following_tokens,
    rows_on_lanes,
)
from dsa_compile.runtime.execution.idle_rows import padded
from dsa_compile.runtime.execution.runner import StepInputs
from dsa_compile.runtime.execution.step_shape import StepShape
from dsa_compile.runtime.ranks.lanes import lane_steps
from dsa_compile.runtime.sampling.draw_options import records_of
from dsa_compile.runtime.sampling.sampler import SamplingState

BLOCK, ROWS, COLUMNS = 4, 4, 6
LANES = st.lists(
    st.lists(st.tuples(st.integers(1, 6), st.integers(0, 4)), max_size=ROWS), min_size=2, max_size=3
).filter(any)
"""For each lane its requests: tokens that they compute, and up to how many of them they yield."""


def step_of(lanes: list[list[tuple[int, int]]]) -> StepInputs:
    """A step of requests that begin at position 5; page ``10 * row + n`` is the nth of a row."""
    counts = [count for lane in lanes for count, _ in lane]
    rows = [ROWS * n + place for n, lane in enumerate(lanes) for place in range(len(lane))]
    wanted = [min(pair) for lane in lanes for pair in lane]
    bounds = np.cumsum([0, *counts])
    positions = np.concatenate([5 + np.arange(count) for count in counts])
    tables = (10 * np.array(rows)[:, None] + np.arange(COLUMNS)).astype(np.int32)
    owners = np.repeat(np.arange(len(rows)), counts)
    drafted = [bounds[n + 1] - np.arange(most) - 1 for n, most in enumerate(wanted)]
    batch = Batch(
        input_ids=np.arange(100, 100 + len(positions)),
        positions=positions,
        slot_mapping=tables[owners, positions // BLOCK].astype(np.int64) * BLOCK
        + positions % BLOCK,
        block_tables=tables,
        cu_seqlens=bounds.astype(np.int32),
        context_lens=np.array(counts, np.int32) + 5,
        logit_rows=np.sort(np.concatenate([np.zeros(0, np.int64), *drafted])).astype(np.int64),
        request_rows=np.array(rows, np.int32),
    )
    yielding = [row for row, most in zip(rows, wanted, strict=True) if most]
    state = SamplingState(SamplingParams(), [1], (), 200)
    most = [count for count in wanted if count]
    states, counted = [state] * len(most), [1] * len(most)
    return StepInputs(batch, yielding, states, counted, most, True, [-1] * len(rows))


def rows_of(step: StepInputs, shape: StepShape) -> DraftedRows:
    """A lane's rows on the device."""
    options = records_of(step.rows, step.states, step.counts)
    whole = replace(step, batch=padded(step.batch, shape.tokens))
    arrays = ragged_inputs(whole, options, ROWS)
    given = {name: torch.from_numpy(array) for name, array in arrays.items()}
    state = RowState.empty(ROWS, torch.device("cpu"))
    return replace(corrected_rows(given, state, BLOCK, flat=False), lanes=shape)


def test_the_shape_is_that_of_the_longest_the_widest_and_the_fullest() -> None:
    step = step_of([[(3, 3), (1, 1)], [(4, 0)], [(1, 1), (1, 1), (1, 1)]])
    steps = lane_steps(step, 3, ROWS)
    assert StepShape.of(steps) == StepShape(4, 3, 3, 2, even=False)
    assert StepShape.of(steps[::2]) == StepShape(4, 3, 3, 2, even=True)
    assert StepShape.of(steps[2:]) == StepShape(3, 3, 1, 0, even=True)


def test_two_tokens_of_a_request_need_no_deeper_draft() -> None:
    """The first draft was made behind the step before."""
    assert StepShape.of(lane_steps(step_of([[(2, 2)], []]), 2, ROWS)).drafting == 0


def test_a_lane_of_nobody_has_no_context() -> None:
    own, idle = lane_steps(step_of([[(3, 3)], []]), 2, ROWS)
    shape = StepShape.of([own, idle])
    rows = rows_of(idle, shape)
    assert rows.values["context_lens"].tolist() == [0]
    assert rows.values["slot_mapping"].tolist() == [-1] * 3
    assert rows.values["logit_rows"].tolist() == []
    assert not following_tokens(rows, torch.empty((0, 1), dtype=torch.int64)).any()
    deeper = deeper_rows(met(rows), 2, BLOCK)
    assert deeper["context_lens"].tolist() == [0]
    assert deeper["slot_mapping"].tolist() == [-1]


def met(rows: DraftedRows) -> DraftedRows:
    """Rows of deeper drafts, as all lanes have them."""
    return rows_on_lanes(rows, ROWS, torch.from_numpy(nobodys_options()))


@pytest.mark.parametrize("depth", [2, 3])
@settings(max_examples=60, deadline=None)
@given(lanes=LANES)
def test_lanes_meet_and_keep_their_own_rows(depth: int, lanes) -> None:
    """All have one shape at every depth; what a lane has of its own is what it has alone."""
    steps = lane_steps(step_of(lanes), len(lanes), ROWS)
    shape = StepShape.of(steps)
    for step in steps:
        rows = rows_of(step, shape)
        values, own = rows.values, step.batch.num_tokens
        assert len(values["input_ids"]) == shape.tokens
        assert (values["slot_mapping"][own:] == -1).all()
        if own:
            alone = rows_of(step, StepShape.of([step]))
            for name in ("input_ids", "positions", "slot_mapping"):
                assert torch.equal(values[name][:own], alone.values[name]), name
            for name in ("context_lens", "block_tables", "cu_seqlens", "logit_rows"):
                assert torch.equal(values[name], alone.values[name]), name
        if not shape.drafting:
            continue
        meeting = met(rows)
        assert meeting.places.shape == (shape.drafting, shape.width)
        made = deeper_rows(meeting, depth, BLOCK)
        assert len(made["positions"]) == len(made["context_lens"]) == shape.drafting
        count = len(step.rows) if rows.width > 2 else 0
        if count:
            for name, found in deeper_rows(rows, depth, BLOCK).items():
                assert torch.equal(made[name][: len(found)], found), name
        assert (made["slot_mapping"][count:] == -1).all()
        assert not made["context_lens"][count:].any()
        assert (meeting.rows[count:] == ROWS).all()
