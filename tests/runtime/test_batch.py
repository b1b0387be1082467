import numpy as np
import pytest

from dsa_compile.runtime.execution.batch import build_batch
from dsa_compile.runtime.pages.table import BlockTable
from dsa_compile.runtime.scheduling.request import Request
from dsa_compile.runtime.scheduling.step import Phase, ScheduledEntry, ScheduledStep

SIZE = 4


class Endless:
    def append(self, token_id):
        return None


def make_step(parts, columns=8):
    """``parts``: (tokens of the request, blocks, start, count, max_new), rows in reverse order."""
    rows = np.full((len(parts) + 1, columns), -1, np.int32)
    entries = []
    for index, (tokens, blocks, start, count, max_new) in enumerate(parts):
        request = Request(f"r{index}", tokens, 1, Endless())
        request.row = len(parts) - index
        rows[request.row, : len(blocks)] = blocks
        phase = Phase.DECODE if count in (1, max_new) else Phase.PROMPT
        entries.append(ScheduledEntry(request, start, count, max_new, phase))
    return ScheduledStep(entries, BlockTable(rows, SIZE))


def test_a_mixed_step():
    batch = build_batch(
        make_step(
            [
                (list(range(100, 107)), [5, 2], 6, 1, 1),
                (list(range(200, 212)), [7, 0, 9], 3, 6, 0),
                (list(range(300, 302)), [1], 0, 2, 1),
            ]
        )
    )
    assert batch.input_ids.tolist() == [106, 203, 204, 205, 206, 207, 208, 300, 301]
    assert batch.positions.tolist() == [6, 3, 4, 5, 6, 7, 8, 0, 1]
    assert batch.slot_mapping.tolist() == [10, 31, 0, 1, 2, 3, 36, 4, 5]
    assert batch.block_tables.tolist() == [[5, 2, -1], [7, 0, 9], [1, -1, -1]]
    assert batch.cu_seqlens.tolist() == [0, 1, 7, 9]
    assert batch.context_lens.tolist() == [7, 9, 2]
    assert batch.logit_rows.tolist() == [0, 8]
    assert batch.request_rows.tolist() == [3, 2, 1]
    assert (batch.num_tokens, batch.num_requests, batch.tokens_each) == (9, 3, None)


def test_a_decode_step_equals_the_general_layout():
    parts = [(list(range(n)), list(range(10 * n, 10 * n + 8)), n - 1, 1, 1) for n in (1, 9, 30)]
    batch = build_batch(make_step(parts))
    assert batch.positions.tolist() == [0, 8, 29]
    assert batch.slot_mapping.tolist() == [10 * SIZE, 92 * SIZE, 307 * SIZE + 1]
    assert batch.block_tables.shape == (3, 8)
    assert batch.logit_rows.tolist() == [0, 1, 2]
    assert batch.tokens_each == 1


def test_drafts_are_unknown_and_want_logits():
    """The first request is decoded with two drafts behind a known token, the next behind another
    that is in flight; positions of both are those of the most that may come before."""
    step = make_step([([7, 8, 9, -1, -1, -1], [5, 2], 2, 3, 3), ([4] + [-1] * 6, [3, 1], 4, 3, 3)])
    batch = build_batch(step)
    assert batch.input_ids.tolist() == [9, -1, -1, -1, -1, -1]
    assert batch.positions.tolist() == [2, 3, 4, 4, 5, 6]
    assert batch.slot_mapping.tolist() == [22, 23, 8, 4, 5, 6]
    assert batch.context_lens.tolist() == [5, 7]
    assert batch.logit_rows.tolist() == [0, 1, 2, 3, 4, 5]
    assert batch.tokens_each == 3


def test_requests_with_unlike_drafts():
    step = make_step([([7, 8, -1, -1], [5], 1, 3, 3), ([4, -1], [3], 0, 2, 2), ([1], [9], 0, 1, 0)])
    batch = build_batch(step)
    assert batch.logit_rows.tolist() == [0, 1, 2, 3, 4]
    assert batch.tokens_each is None


@pytest.mark.parametrize("decode", [True, False])
def test_dtypes_are_the_pinned_ones(decode):
    batch = build_batch(make_step([([1, 2, 3], [0], 2 * decode, 1 if decode else 3, 1)]))
    types = {name: str(array.dtype) for name, array in batch.arrays().items()}
    assert types == {
        "input_ids": "int64",
        "positions": "int64",
        "slot_mapping": "int64",
        "block_tables": "int32",
        "cu_seqlens": "int32",
        "context_lens": "int32",
        "logit_rows": "int64",
        "request_rows": "int32",
    }


def test_a_batch_keeps_its_own_copy():
    step = make_step([([1, 2, 3], [4], 0, 3, 1)])
    batch = build_batch(step)
    step.table.rows[:] = -1
    step.entries[0].request.token_ids[:] = 0
    assert batch.block_tables.tolist() == [[4]]
    assert batch.input_ids.tolist() == [1, 2, 3]


def test_short_means_no_context_exceeds_topk():
    batch = build_batch(make_step([([0] * 9, [1, 2, 3], 8, 1, 1), ([0], [4], 0, 1, 1)]))
    assert batch.is_short(9)
    assert not batch.is_short(8)


def test_no_logits_are_asked_of_an_unfinished_prompt():
    batch = build_batch(make_step([([0] * 9, [1, 2, 3], 0, 5, 0)]))
    assert batch.logit_rows.tolist() == []
    assert batch.logit_rows.dtype == np.int64
