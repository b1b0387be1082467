"""Rows of nobody change nothing: random steps with drafts, padded and as they are."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsa_compile.runtime.execution.draft_inputs import ragged_inputs
from dsa_compile.runtime.execution.draft_rows import (
    DraftedRows,
    RowState,
    corrected_rows,
    count_right,
    deeper_rows,
    following_tokens,
    keep,
)
from dsa_compile.runtime.sampling.draw_options import sample_rows
from tests.many_cases import many

from .drafted_steps import Shape, copy_of, options_of, padded_step, state_of, step_of

SHAPE = Shape()
BLOCK, WIDTH, COLUMNS = SHAPE.block_size, SHAPE.width, SHAPE.columns
STEPS = st.tuples(
    st.integers(0, 2**32 - 1),
    st.lists(st.integers(0, WIDTH), min_size=1, max_size=6).filter(any),  # 0: yields nothing
    st.integers(0, 2),  # requests of nobody
)


def run(rows: DraftedRows, state: RowState, logits: torch.Tensor, drafts: torch.Tensor) -> dict:
    """Values that a step makes of its rows, by the names that a model and the next step use."""
    found = {**rows.values, "input_ids": rows.with_drafts(drafts)}
    sampled = sample_rows(logits, rows.grid_options()).view(rows.places.shape)
    kept = count_right(sampled, drafts, rows.max_new)
    keep(state, rows, sampled, kept)
    found |= {"sampled": sampled, "kept": kept, "following": following_tokens(rows, sampled)}
    for depth in range(2, rows.width):
        deeper = deeper_rows(rows, depth, BLOCK)
        found |= {f"{name} {depth}": deeper[name] for name in ("positions", "slot_mapping")}
        found |= {f"{name} {depth}": deeper[name] for name in ("block_tables", "context_lens")}
    return found


@settings(max_examples=many(60), deadline=None)
@given(STEPS)
def test_a_padded_step_is_the_step(case: tuple[int, list[int], int]) -> None:
    seed, wanted, nobody = case
    generator = np.random.default_rng(seed)
    inputs = step_of(generator, wanted, SHAPE)
    options = options_of(generator, inputs, SHAPE)
    before = state_of(generator, inputs, SHAPE)

    arrays = ragged_inputs(inputs, options, SHAPE.rows)
    step = {name: torch.from_numpy(array) for name, array in arrays.items()}
    step["every_row"] = torch.arange(inputs.batch.num_tokens)
    plain_state = copy_of(before)
    plain_rows = corrected_rows(step, plain_state, BLOCK, flat=True)

    requests = len(wanted) + nobody
    sent, places = padded_step(inputs, options, SHAPE, requests, COLUMNS + 1)
    state = copy_of(before)
    rows = corrected_rows(sent, state, BLOCK, flat=True)

    logits = torch.from_numpy(
        generator.normal(size=(requests, WIDTH, SHAPE.vocab)).astype(np.float32)
    )
    logits[torch.from_numpy(generator.random((requests, WIDTH)) < 0.1)] = torch.nan
    drafts = torch.from_numpy(generator.integers(0, SHAPE.vocab, (requests, WIDTH - 1)))
    width = plain_rows.width
    mine = logits[places, :width].flatten(0, 1)
    made = run(plain_rows, plain_state, mine, drafts[places, : width - 1])
    found = run(rows, state, logits.flatten(0, 1), drafts)

    for name in ("last", "ends", "first"):
        assert torch.equal(
            getattr(state, name)[: SHAPE.rows], getattr(plain_state, name)[: SHAPE.rows]
        ), name
    counts = torch.tensor(np.maximum(wanted, 1))
    real = torch.zeros(requests, WIDTH, dtype=torch.bool)
    real[: len(wanted)] = torch.arange(WIDTH) < counts[:, None]
    every = real.flatten()
    for name in ("input_ids", "positions", "slot_mapping", "context_lens", "following"):
        assert torch.equal(found[name][every], made[name]), name
    assert torch.equal(found["block_tables"][every, :COLUMNS], made["block_tables"])
    assert (found["slot_mapping"][~every] == -1).all()
    assert (found["context_lens"][~every] == 0).all()
    assert (found["block_tables"][~every] == -1).all()
    assert torch.equal(found["kept"][places], made["kept"])
    for place, ours, theirs in zip(places, found["sampled"][places], made["sampled"], strict=True):
        kept = int(found["kept"][place])
        assert torch.equal(ours[:kept], theirs[:kept])
    others = torch.ones(requests, dtype=torch.bool)
    others[places] = False
    for depth in range(2, WIDTH):
        assert (found[f"slot_mapping {depth}"][others] == -1).all()
        if depth < width:
            for name in ("positions", "slot_mapping", "context_lens"):
                assert torch.equal(found[f"{name} {depth}"][places], made[f"{name} {depth}"]), name
