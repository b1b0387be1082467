"""Rows of nobody change nothing: random steps with drafts, padded and as they are."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsa_compile.kernels.cuda.sample_tokens import OPTIONS
from dsa_compile.runtime import SamplingParams
from dsa_compile.runtime.execution.batch import Batch
from dsa_compile.runtime.execution.draft_inputs import (
    PaddedInputs,
    fits_padded,
    padded_constants,
    ragged_inputs,
)
from dsa_compile.runtime.execution.draft_rows import (
    DraftedRows,
    RowState,
    corrected_rows,
    count_right,
    deeper_rows,
    following_tokens,
    keep,
    options_of_grid,
    with_drafts,
)
from dsa_compile.runtime.execution.runner import StepInputs
from dsa_compile.runtime.sampling.draw_options import sample_rows
from dsa_compile.runtime.sampling.sampler import SamplingState
from tests.many_cases import many

BLOCK, ROWS, WIDTH, COLUMNS, VOCAB = 4, 8, 4, 9, 6
CPU = torch.device("cpu")
STEPS = st.tuples(
    st.integers(0, 2**32 - 1),
    st.lists(st.integers(0, WIDTH), min_size=1, max_size=6).filter(any),  # 0: yields nothing
    st.integers(0, 2),  # requests of nobody
)


def step_of(generator: np.random.Generator, wanted: list[int]) -> StepInputs:
    """Requests with so many rows each; every page belongs to one of them."""
    counts = np.maximum(wanted, 1)
    requests, starts = len(wanted), generator.integers(WIDTH, 20, len(wanted))
    rows = generator.permutation(ROWS)[:requests]
    tables = generator.permutation(requests * COLUMNS).astype(np.int32).reshape(requests, COLUMNS)
    owners = np.repeat(np.arange(requests), counts)
    positions = np.concatenate([np.arange(s, s + n) for s, n in zip(starts, counts, strict=True)])
    bounds = np.concatenate([[0], np.cumsum(counts)])
    ids = np.full(len(positions), -1)
    known = (generator.random(requests) < 0.5) | (np.array(wanted) == 0)
    ids[bounds[:-1][known]] = generator.integers(0, VOCAB, known.sum())
    batch = Batch(
        input_ids=ids,
        positions=positions,
        slot_mapping=tables[owners, positions // BLOCK].astype(np.int64) * BLOCK
        + positions % BLOCK,
        block_tables=tables,
        cu_seqlens=bounds.astype(np.int32),
        context_lens=(starts + counts).astype(np.int32),
        logit_rows=np.arange(len(positions)),
        request_rows=rows.astype(np.int32),
        tokens_each=int(counts[0]) if len(set(wanted)) == 1 else None,
    )
    yielding = [n for n, most in enumerate(wanted) if most]
    following = [-1 if most else int(generator.integers(0, VOCAB)) for most in wanted]
    state = SamplingState(SamplingParams(), [1], (), VOCAB)
    return StepInputs(
        batch,
        [int(rows[n]) for n in yielding],
        [state] * len(yielding),
        [9] * len(yielding),
        [wanted[n] for n in yielding],
        True,
        following,
    )


def state_of(generator: np.random.Generator, inputs: StepInputs) -> RowState:
    state = RowState.empty(ROWS, CPU)
    state.last[:] = torch.from_numpy(generator.integers(0, VOCAB, ROWS + 1))
    state.first[:] = torch.from_numpy(generator.integers(0, VOCAB, ROWS + 1))
    batch = inputs.batch
    state.ends[batch.request_rows] = torch.from_numpy(
        batch.positions[batch.cu_seqlens[:-1]] - generator.integers(0, WIDTH, batch.num_requests)
    )
    return state


def run(rows: DraftedRows, state: RowState, logits: torch.Tensor, drafts: torch.Tensor) -> dict:
    """What a step makes of its rows, by the names of what a model and the next step see."""
    found = {**rows.values, "input_ids": with_drafts(rows, drafts)}
    sampled = sample_rows(logits, options_of_grid(rows)).view(rows.places.shape)
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
    inputs = step_of(generator, wanted)
    assert fits_padded(inputs)
    options = np.zeros(len(inputs.rows), OPTIONS)
    options["row"], options["top_k"] = inputs.rows, VOCAB
    options["temperature"] = generator.choice([0.0, 1.0], len(inputs.rows))
    options["floor"], options["step"] = -np.inf, inputs.counts
    before = state_of(generator, inputs)

    arrays = ragged_inputs(inputs, options, ROWS)
    step = {name: torch.from_numpy(array) for name, array in arrays.items()}
    step["every_row"] = torch.arange(inputs.batch.num_tokens)
    plain_state = RowState(*(tensor.clone() for tensor in (before.last, before.ends, before.first)))
    plain_rows = corrected_rows(step, plain_state, BLOCK, flat=True)

    requests = len(wanted) + nobody
    sent = PaddedInputs(requests, WIDTH, COLUMNS + 1, ROWS)
    memory = np.full(sent.layout.nbytes, 0x55, np.uint8)
    places = torch.from_numpy(sent.write(memory, inputs, options))
    padded_step = sent.layout.in_torch(torch.from_numpy(memory))
    padded_step |= padded_constants(requests, WIDTH, CPU)
    state = RowState(*(tensor.clone() for tensor in (before.last, before.ends, before.first)))
    rows = corrected_rows(padded_step, state, BLOCK, flat=True)

    logits = torch.from_numpy(generator.normal(size=(requests, WIDTH, VOCAB)).astype(np.float32))
    logits[torch.from_numpy(generator.random((requests, WIDTH)) < 0.1)] = torch.nan
    drafts = torch.from_numpy(generator.integers(0, VOCAB, (requests, WIDTH - 1)))
    width = plain_rows.width
    mine = logits[places, :width].flatten(0, 1)
    made = run(plain_rows, plain_state, mine, drafts[places, : width - 1])
    found = run(rows, state, logits.flatten(0, 1), drafts)

    for name in ("last", "ends", "first"):
        assert torch.equal(getattr(state, name)[:ROWS], getattr(plain_state, name)[:ROWS]), name
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
