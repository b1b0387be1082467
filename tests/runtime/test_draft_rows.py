"""Rows of a step with drafts, derived on the device: by hand, and without reading it."""

import numpy as np
import pytest
import torch

from dsa_compile.kernels.cuda.sample_tokens import OPTIONS
from dsa_compile.runtime import SamplingParams
from dsa_compile.runtime.execution.batch import Batch
from dsa_compile.runtime.execution.draft_inputs import (
    PaddedInputs,
    fits_padded,
    ragged_inputs,
)
from dsa_compile.runtime.execution.draft_rows import (
    RowState,
    corrected_rows,
    count_right,
    deeper_rows,
    following_tokens,
    force_count,
    forced_lengths,
    keep,
)
from dsa_compile.runtime.execution.runner import StepInputs
from dsa_compile.runtime.sampling.draw_options import STEP, sample_rows
from dsa_compile.runtime.sampling.sampler import SamplingState

BLOCK, ROWS, WIDTH = 4, 5, 3
# Three rows of request 2, of which the host knows nothing; two of request 0, whose last token it
# knows. The step before may have yielded up to two tokens of request 2, and yielded one.
BATCH = Batch(
    input_ids=np.array([-1, -1, -1, 7, -1]),
    positions=np.array([6, 7, 8, 2, 3]),
    slot_mapping=np.array([12 * 4 + 2, 12 * 4 + 3, 13 * 4, 30 * 4 + 2, 30 * 4 + 3]),
    block_tables=np.array([[11, 12, 13], [30, -1, -1]], np.int32),
    cu_seqlens=np.array([0, 3, 5], np.int32),
    context_lens=np.array([9, 4], np.int32),
    logit_rows=np.arange(5),
    request_rows=np.array([2, 0], np.int32),
)


def inputs_of(batch=BATCH):
    state = SamplingState(SamplingParams(), [1], (), 50)
    return StepInputs(batch, [2, 0], [state, state], [9, 4], [3, 2], True, [-1, -1])


def options_of():
    records = np.zeros(2, OPTIONS)
    records["step"] = [9, 4]
    return records


def state_of():
    state = RowState.empty(ROWS, torch.device("cpu"))
    state.last[2], state.ends[2], state.first[2] = 41, 5, 43
    return state


def ragged():
    arrays = ragged_inputs(inputs_of(), options_of(), ROWS)
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def padded(requests=4, columns=5):
    sent = PaddedInputs(requests, WIDTH, columns, ROWS)
    memory = np.full(sent.layout.nbytes, 0x55, np.uint8)
    places = sent.write(sent.in_numpy(memory), inputs_of(), options_of())
    assert list(places) == [0, 1]
    tensors = sent.layout.in_torch(torch.from_numpy(memory))
    return tensors | sent.constants(torch.device("cpu"))


def test_what_was_not_yielded_is_taken_off():
    rows = corrected_rows(ragged(), state_of(), BLOCK, flat=False)
    values = rows.values
    assert values["input_ids"].tolist() == [41, -1, -1, 7, -1]
    assert values["positions"].tolist() == [5, 6, 7, 2, 3]
    assert values["slot_mapping"].tolist() == [49, 50, 51, 122, 123]
    assert values["context_lens"].tolist() == [8, 4]
    assert (rows.start.tolist(), rows.last.tolist()) == ([5, 2], [41, 7])
    assert rows.options[:, STEP].tolist() == [8, 4]
    assert rows.grid_options()[:, STEP].tolist() == [8, 9, 10, 4, 5, 6]


def test_a_padded_step_is_the_same_with_rows_of_nobody():
    rows = corrected_rows(padded(), state_of(), BLOCK, flat=True)
    values = rows.values
    nobody = [0] * 6
    assert values["input_ids"].tolist() == [41, -1, -1, 7, -1, 0, *nobody]
    assert values["positions"].tolist() == [5, 6, 7, 2, 3, 0, *nobody]
    assert values["context_lens"].tolist() == [6, 7, 8, 3, 4, 0, *nobody]
    assert values["slot_mapping"].tolist() == [49, 50, 51, 122, 123, -1, *([-1] * 6)]
    assert values["block_tables"][2].tolist() == [11, 12, 13, -1, -1]
    assert (values["block_tables"][5:] == -1).all()
    assert rows.rows.tolist() == [2, 0, ROWS, ROWS]
    assert fits_padded(inputs_of())


def test_a_row_of_nobody_overwrites_no_token():
    options = corrected_rows(padded(), state_of(), BLOCK, flat=True).grid_options()
    assert (options.numpy().view(OPTIONS)["row"] == -1).all()
    logits = torch.eye(4 * WIDTH, 20)
    assert sample_rows(logits, options).tolist() == list(range(4 * WIDTH))


@pytest.mark.parametrize("flat", [False, True])
def test_drafts_come_to_their_places(flat):
    rows = corrected_rows(padded() if flat else ragged(), state_of(), BLOCK, flat=flat)
    drafts = torch.tensor([[43, 44], [8, 9]] + [[1, 2]] * (2 * flat))
    assert rows.with_drafts(drafts)[:5].tolist() == [41, 43, 44, 7, 8]
    assert not rows.with_drafts(drafts)[5:].any()


def test_drafts_of_every_depth_begin_where_kernels_were_compiled_for():
    """Triton compiles anew for memory that does not begin at a multiple of 16 bytes."""
    state = state_of()
    drafts = corrected_rows(padded(requests=3), state, BLOCK, flat=True).first_drafts(state)
    assert drafts.shape == (WIDTH - 1, 3)
    assert [row.data_ptr() % 16 for row in drafts] == [0] * (WIDTH - 1)
    assert drafts[0, 0] == 43


def test_a_deeper_draft_stands_where_its_state_comes_from():
    made = deeper_rows(corrected_rows(padded(), state_of(), BLOCK, flat=True), 2, BLOCK)
    assert made["positions"].tolist() == [5, 0, 0, 0]  # the other request wants one draft
    assert made["slot_mapping"].tolist() == [49, -1, -1, -1]
    assert made["context_lens"].tolist() == [6, 0, 0, 0]
    assert (made["block_tables"][1:] == -1).all()


@pytest.mark.parametrize(
    ("sampled", "drafts", "most", "right"),
    [
        ([5, 6, 7], [5, 6], 3, 3),
        ([5, 6, 7], [5, 9], 3, 2),
        ([5, 6, 7], [9, 6], 3, 1),
        ([5, 6, 7], [5, 6], 2, 2),
        ([5, 6, 7], [5, 6], 1, 1),
        ([-1, 6, 7], [0, 6], 3, 1),  # failed: alone, as what the request ends with
        ([5, -1, 7], [5, 6], 3, 1),  # the next step meets it again
    ],
)
def test_tokens_count_up_to_the_first_wrong_draft(sampled, drafts, most, right):
    tensors = (torch.tensor([some]) for some in (sampled, drafts))
    assert count_right(*tensors, torch.tensor([most])).tolist() == [right]


@pytest.mark.parametrize("per_thousand", [1000, 1850, 2990, 3000, 4333, 5000])
def test_forced_lengths_have_the_average(per_thousand):
    counts = torch.tensor([1, 1])
    lengths = []
    for _ in range(400):
        lengths.append(forced_lengths(counts, per_thousand))
        counts = counts + lengths[-1]
    assert (counts - 1 == 400 * per_thousand // 1000).all()
    whole, more = divmod(per_thousand, 1000)
    assert {length[0].item() for length in lengths} == {whole, whole + (more > 0)}
    # from any other place a request goes on to one of those
    most = whole + (more > 0)
    assert all(1 <= forced_lengths(torch.tensor(n), per_thousand) <= most for n in range(90))


@pytest.mark.parametrize(
    ("sampled", "most", "kept"),
    [
        ([5, 6, 7], 3, 2),
        ([5, 6, 7], 1, 1),
        ([5, -1, 7], 3, 1),  # the next step meets it again
        ([-1, 6, 7], 3, 1),  # failed
    ],
)
def test_forced_lengths_end_with_the_rows_and_before_a_failed_one(sampled, most, kept):
    rows = corrected_rows(padded(), state_of(), BLOCK, flat=True)
    rows.options[0, STEP], rows.max_new[0] = 1, most
    tokens = torch.tensor([sampled, *[[1, 1, 1]] * 3])
    assert force_count(rows, tokens, 2000)[0] == kept


def test_what_a_step_leaves_is_what_the_next_one_starts_with():
    state = state_of()
    rows = corrected_rows(padded(), state, BLOCK, flat=True)
    sampled = torch.tensor([[43, 60, 61], [8, 70, 0], [0, 0, 0], [0, 0, 0]])
    keep(state, rows, sampled, torch.tensor([2, 2, 1, 1]))
    assert state.last[[2, 0]].tolist() == [60, 70]
    assert state.ends[[2, 0]].tolist() == [7, 4]
    assert (state.last[[1, 3, 4]] == 0).all()
    assert following_tokens(rows, sampled)[:5].tolist() == [43, 60, 61, 8, 70]


@pytest.mark.parametrize("flat", [False, True])
def test_nothing_is_read_from_the_device(flat):
    """On tensors without memory, which nobody can read."""
    step = {name: tensor.to("meta") for name, tensor in (padded() if flat else ragged()).items()}
    state = RowState.empty(ROWS, torch.device("meta"))
    rows = corrected_rows(step, state, BLOCK, flat=flat)
    count = len(rows.rows)
    drafts = torch.empty(count, WIDTH - 1, dtype=torch.int64, device="meta")
    assert rows.with_drafts(drafts).shape == rows.grid.shape
    deeper_rows(rows, 2, BLOCK)
    sampled = torch.empty(count, WIDTH, dtype=torch.int64, device="meta")
    assert rows.grid_options().shape == (count * WIDTH, 5)
    force_count(rows, sampled, 2500)
    kept = count_right(sampled, drafts, rows.max_new)
    keep(state, rows, sampled, kept)
    assert following_tokens(rows, sampled).shape == rows.grid.shape


def test_rows_are_sampled_by_their_records():
    records = np.zeros(3, OPTIONS)
    records["row"], records["top_k"] = -1, 4
    options = torch.from_numpy(records.view(np.int64).reshape(3, 5))
    logits = torch.tensor([[0.0, 2, 1, 0], [3, 2, 1, 0], [0, torch.nan, 0, 0]])
    assert sample_rows(logits, options).tolist() == [1, 0, -1]
