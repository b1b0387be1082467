"""Which graph a step with prompt tokens takes, and what its padding holds; no GPU."""

import numpy as np
import pytest

from dsa_compile.ir.plan import LONG, PROMPT, SHORT
from dsa_compile.runtime.execution.batch import Batch
from dsa_compile.runtime.execution.graph_plan import GraphKey, GraphPlan
from dsa_compile.runtime.execution.idle_rows import write_padded
from dsa_compile.runtime.execution.plain_inputs import PlainInputs, padded_batch

BLOCK = 64


def plan(tokens=(512, 2048), **options):
    limits = {"max_num_seqs": 256, "max_model_len": 163_840, "block_size": BLOCK, "topk": 2048}
    return GraphPlan.of(mixed_tokens=tokens, **(limits | options))


def step(counts, contexts, wanted=None):
    """Requests that compute the last ``counts`` tokens of these contexts."""
    counts, contexts = np.array(counts), np.array(contexts, np.int32)
    ends = np.cumsum(counts)
    pages = -(-contexts // BLOCK)
    tables = np.full((len(counts), pages.max()), -1, np.int32)
    for row, count in enumerate(pages):
        tables[row, :count] = 1000 * row + np.arange(count)
    wanted = range(len(counts)) if wanted is None else wanted
    return Batch(
        input_ids=np.arange(ends[-1]) + 10,
        positions=np.concatenate(
            [np.arange(end - n, end) for n, end in zip(counts, contexts, strict=True)]
        ),
        slot_mapping=np.arange(ends[-1]) * 7,
        block_tables=tables,
        cu_seqlens=np.concatenate(([0], ends)).astype(np.int32),
        context_lens=contexts,
        logit_rows=np.array([ends[row] - 1 for row in wanted], np.int64),
        request_rows=np.arange(len(counts), dtype=np.int32)[::-1].copy(),
        tokens_each=1 if (counts == 1).all() else None,
    )


@pytest.mark.parametrize(
    ("counts", "context", "tokens", "rows"),
    [
        ([512], 512, 512, 64),
        ([1] * 64 + [448], 8192, 512, 256),
        ([1] * 63 + [449], 8192, 512, 64),
        ([1] * 64 + [1984], 16_384, 2048, 256),
        ([600, 500], 2048, 2048, 64),
    ],
)
def test_the_smallest_graph_that_takes_a_step(counts, context, tokens, rows):
    batch = step(counts, [context] * len(counts))
    variant = SHORT if context <= 2048 else LONG
    key = plan().choose(batch, variant)
    assert key in set(plan().graphs())
    assert (key.variant, key.mixed_tokens, key.rows) == (variant, tokens, rows)
    assert key.columns * BLOCK >= context


@pytest.mark.parametrize(
    ("counts", "context", "why"),
    [
        ([2049], 2049, "more tokens than any graph"),
        ([255], 255, "less than half of a graph"),
        ([1000], 1000, "less than half of the next graph"),
        ([512], 16_385, "a longer context"),
        ([2] * 256 + [100], 8192, "more requests"),
        ([1] * 300, 8192, "a decode step"),
    ],
)
def test_steps_without_a_graph(counts, context, why):
    batch = step(counts, [context] * len(counts))
    variant = SHORT if context <= 2048 else LONG
    assert plan().choose(batch, variant) is None, why


def test_more_logits_than_requests_need_a_graph_with_as_many_rows():
    """Prompts whose drafts are checked, or that are scored, want several logits of a request."""
    batch = step([400, 100], [400, 100])
    rows = np.arange(400, 500)
    wide = Batch(**{**batch.arrays(), "logit_rows": rows})
    assert plan().choose(wide, SHORT).rows == 256
    assert plan(max_num_seqs=64).choose(wide, SHORT) is None


def test_without_short_regions_a_short_step_takes_a_long_graph():
    assert plan(topk=None).choose(step([512], [512]), SHORT) == GraphKey(
        LONG, 64, 256, mixed_tokens=512
    )


def test_whole_prompts_take_a_short_graph():
    assert plan().choose(step([512], [512]), PROMPT) == GraphKey(SHORT, 64, 32, mixed_tokens=512)
    assert plan(topk=None).choose(step([512], [512]), PROMPT) == GraphKey(
        LONG, 64, 256, mixed_tokens=512
    )


@pytest.mark.parametrize(
    ("counts", "contexts", "prompts"),
    [
        ([2048], [2048], True),
        ([5, 1, 300], [5, 1, 300], True),
        ([2049], [2049], False),
        ([5, 300], [5, 301], False),  # behind a cached prefix, or a later chunk
        ([1, 300], [9, 300], False),  # beside a decoding request
    ],
)
def test_steps_of_whole_prompts(counts, contexts, prompts):
    made = step(counts, contexts)
    assert (made.is_short(2048) and made.is_prompts()) is prompts


def test_the_largest_come_first_and_none_twice():
    keys = list(plan(tokens=(2048, 512, 512)).graphs())
    assert len(keys) == len(set(keys)) == 8
    assert keys[0] == GraphKey(LONG, 256, 16_384 // BLOCK, mixed_tokens=2048)
    assert len(list(plan(max_num_seqs=64).graphs())) == 4


def test_padding_belongs_to_nobody():
    batch = step([1, 5], [100, 65], wanted=[1])
    layout = PlainInputs(GraphKey(LONG, 4, 6, mixed_tokens=8)).layout
    views = layout.in_numpy(np.full(layout.nbytes, 77, np.uint8))
    write_padded(batch, views)
    for name in ("input_ids", "positions", "slot_mapping", "context_lens", "logit_rows"):
        real = getattr(batch, name)
        assert (views[name][: len(real)] == real).all(), name
    assert views["cu_seqlens"].tolist() == [0, 1, 6, 6, 6]
    assert views["token_rows"].tolist() == [1, 0, 0, 0, 0, 0, -1, -1]
    assert (views["block_tables"][:2, :2] == batch.block_tables).all()
    assert (views["block_tables"][:, 2:] == -1).all()
    assert (views["block_tables"][2:] == -1).all()
    assert (views["slot_mapping"][6:] == -1).all()
    assert views["context_lens"][2:].tolist() == [0, 0]
    write_padded(None, views)
    assert views["cu_seqlens"].tolist() == [0] * 5
    assert (views["slot_mapping"] == -1).all()


def test_a_padded_step_wants_its_own_logits_first():
    padded = padded_batch(step([1, 5], [100, 65], wanted=[1]), 4, 6, 8)
    assert (padded.num_tokens, padded.num_requests, padded.tokens_each) == (8, 4, None)
    assert padded.logit_rows.tolist() == [5, 0, 0, 0]
    assert padded.request_rows.tolist() == [1, 0, -1, -1]
