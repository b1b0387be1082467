"""Which graph a step takes, and what its padded rows hold; no GPU."""

import numpy as np
import pytest

from dsa_compile.ir.plan import LONG, SHORT
from dsa_compile.runtime.engine_options import DETERMINISTIC_ROWS
from dsa_compile.runtime.execution.batch import Batch
from dsa_compile.runtime.execution.graph_plan import GraphKey, GraphPlan
from dsa_compile.runtime.execution.idle_rows import write_padded
from dsa_compile.runtime.execution.plain_inputs import PlainInputs, padded_batch

BLOCK = 64


def plan(**options):
    limits = {"max_num_seqs": 256, "max_model_len": 163_840, "block_size": BLOCK, "topk": 2048}
    return GraphPlan.of(**(limits | options))


def decode(contexts, tokens=None):
    contexts = np.array(contexts, np.int32)
    rows = len(contexts)
    pages = -(-contexts // BLOCK)
    tables = np.full((rows, pages.max()), -1, np.int32)
    for row, count in enumerate(pages):
        tables[row, :count] = 1000 * row + np.arange(count)
    return Batch(
        input_ids=np.arange(rows if tokens is None else tokens) + 10,
        positions=contexts.astype(np.int64) - 1,
        slot_mapping=np.arange(rows) * 7,
        block_tables=tables,
        cu_seqlens=np.arange(rows + 1, dtype=np.int32),
        context_lens=contexts,
        logit_rows=np.arange(rows),
        request_rows=np.arange(rows, dtype=np.int32)[::-1].copy(),
        tokens_each=1 if tokens is None else None,
    )


@pytest.mark.parametrize("rows", [1, 2, 5, 8, 9, 100, 255, 256])
@pytest.mark.parametrize("context", [1, 2048, 2049, 16_384, 16_385, 40_000, 163_840])
def test_the_smallest_graph_that_takes_a_step(rows, context):
    batch = decode([1] * (rows - 1) + [context])
    variant = SHORT if context <= 2048 else LONG
    key = plan().choose(batch, variant)
    assert key in set(plan().graphs())
    assert (key.variant, key.tokens_each, key.mixed_tokens) == (variant, 1, 0)
    assert key.rows >= rows
    assert key.columns * BLOCK >= context
    smaller = [
        k for k in plan().graphs()
        if k.variant == variant and k.rows >= rows and k.columns * BLOCK >= context and k != key
    ]  # fmt: skip
    assert all((k.rows, k.columns) >= (key.rows, key.columns) for k in smaller)


def test_steps_without_a_graph():
    assert plan(max_num_seqs=8).choose(decode([1] * 9), SHORT) is None
    assert plan(max_model_len=4096).choose(decode([4097]), LONG) is None
    prefill = decode([5, 5], tokens=3)
    assert plan().choose(prefill, SHORT) is None


def test_without_short_regions_a_short_step_takes_a_long_graph():
    key = plan(topk=None).choose(decode([5]), SHORT)
    assert key == GraphKey(LONG, 1, 16_384 // BLOCK)


def test_the_largest_come_first():
    keys = list(plan().graphs())
    assert [k.rows for k in keys] == sorted((k.rows for k in keys), reverse=True)
    assert len(set(keys)) == len(keys)
    assert keys[0] == GraphKey(LONG, 256, 2560)


@pytest.mark.parametrize("limit", [1, 7, 32, 64])
def test_deterministic_steps_are_alike(limit):
    """Up to 32 rows at any context: one shape, and never a short one."""
    made = plan(max_num_seqs=limit, deterministic=True)
    taken = {
        made.choose(decode([context] * rows), SHORT if context <= 2048 else LONG)
        for rows in range(1, min(limit, DETERMINISTIC_ROWS) + 1)
        for context in (1, 2048, 9000, 163_840)
    }
    assert taken == {GraphKey(LONG, DETERMINISTIC_ROWS, 2560)}


def test_padded_rows_own_nothing():
    batch = decode([100, 65])
    layout = PlainInputs(GraphKey(LONG, 4, 6)).layout
    views = layout.in_numpy(np.full(layout.nbytes, 77, np.uint8))
    write_padded(batch, views)
    for name, view in views.items():
        real = getattr(batch, name)
        inside = view[:2, : real.shape[1]] if real.ndim == 2 else view[:2]
        assert (inside == real).all(), name
    assert (views["block_tables"][:, 2:] == -1).all()
    assert (views["block_tables"][2:] == -1).all()
    assert (views["slot_mapping"][2:] == -1).all()
    assert (views["token_rows"][2:] == -1).all()
    for name in ("context_lens", "positions", "input_ids"):
        assert (views[name][2:] == 0).all(), name


def test_a_padded_batch_gives_the_logits_of_all_rows():
    padded = padded_batch(decode([100, 65]), 5, 7)
    assert (padded.num_tokens, padded.num_requests, padded.tokens_each) == (5, 5, 1)
    assert padded.block_tables.shape == (5, 7)
    assert padded.logit_rows.tolist() == [0, 1, 2, 3, 4]
    assert padded.cu_seqlens.tolist() == [0, 1, 2, 3, 4, 5]
