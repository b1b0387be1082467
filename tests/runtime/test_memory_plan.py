"""Dividing a GPU's memory; no GPU."""

import numpy as np
import pytest

from dsa_compile.errors import UserError
from dsa_compile.runtime.loading.memory_plan import (
    GIB,
    blocks_to_measure,
    graph_bytes,
    largest_decode,
    largest_prefill,
    plan_memory,
)

PARTS = {
    "total": 140 * GIB,
    "resident": 50 * GIB,
    "step": 6 * GIB,
    "graphs": 2 * GIB,
    "page": 10 << 20,
    "utilization": 0.9,
    "needed_blocks": 2560,
    "most_blocks": 1 << 30,
}


def test_the_rest_is_for_the_caches():
    plan = plan_memory(**PARTS)
    taken = plan.resident + plan.step + plan.graphs + plan.num_blocks * plan.page
    assert plan.usable - plan.page < taken <= plan.usable
    assert "50.0" in plan.describe(64)
    assert f"{plan.num_blocks * 64:,} tokens" in plan.describe(64)


def test_no_more_than_could_be_used():
    assert plan_memory(**PARTS | {"most_blocks": 3000}).num_blocks == 3000


@pytest.mark.parametrize("change", [{"resident": 118 * GIB}, {"resident": 130 * GIB}])
def test_one_request_must_fit(change):
    with pytest.raises(UserError, match=r"need 25.0 GiB.*lower max_model_len"):
        plan_memory(**PARTS | change)


def test_just_enough():
    room = PARTS["needed_blocks"] * PARTS["page"]
    usable = PARTS["resident"] + PARTS["step"] + PARTS["graphs"] + room
    plan = plan_memory(**PARTS | {"total": usable, "utilization": 1.0})
    assert plan.num_blocks == PARTS["needed_blocks"]


def test_graphs_cost_nothing_if_there_are_none():
    assert graph_bytes(0, 256, 129_280, GIB) == 0
    assert graph_bytes(1, 256, 129_280, GIB) > GIB + 256 * 129_280 * 4


@pytest.mark.parametrize("num_blocks", [3, 100])
def test_the_largest_steps_stay_within_the_caches(num_blocks):
    prefill = largest_prefill(50, 1000, num_blocks, 16)
    assert (prefill.num_tokens, prefill.context_lens.tolist()) == (50, [1000])
    assert prefill.positions.tolist() == list(range(950, 1000))
    decode = largest_decode(7, 1000, num_blocks, 16)
    assert (decode.num_tokens, decode.num_requests) == (7, 7)
    for batch in (prefill, decode):
        assert batch.block_tables.shape[1] == 63
        assert 0 <= batch.block_tables.min() <= batch.block_tables.max() < num_blocks
        assert batch.slot_mapping.max() < num_blocks * 16
        assert (batch.slot_mapping % 16 == batch.positions % 16).all()
        assert np.diff(batch.cu_seqlens).sum() == batch.num_tokens


def test_a_prompt_shorter_than_a_chunk():
    assert largest_prefill(2048, 100, 10, 16).num_tokens == 100


def test_steps_are_measured_over_no_more_blocks_than_there_will_be():
    """One request of 128K: its caches are 2,065 blocks, whatever a step could read."""
    sizes = {"needed": 2065, "read": 262_144}
    assert blocks_to_measure(**sizes, real=2065, fitting=400_000) == 2065
    assert blocks_to_measure(**sizes, real=30_000, fitting=400_000) == 30_000
    assert blocks_to_measure(**sizes, real=300_000, fitting=400_000) == 262_144
    assert blocks_to_measure(**sizes, real=1000, fitting=400_000) == 2065  # refused later, by name
    assert blocks_to_measure(**sizes, real=300_000, fitting=5000) == 5000
    assert blocks_to_measure(**sizes, real=0, fitting=0) == 1
