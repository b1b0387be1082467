import pytest
import torch

from dsa_compile.errors import UserError
from dsa_compile.measure.eval.key_selection import (
    overrides_of,
    replace_ops,
    select_all,
    select_recent,
)
from dsa_compile.ops import PAGED_INDEX_TOPK, SPARSE_ATTENTION

TOPK, BLOCK = 3, 2
# Two requests: the last 2 of 5 tokens in blocks 7, 0, 4; all 2 tokens of block 9.
TABLES = torch.tensor([[7, 0, 4], [9, -1, -1]], dtype=torch.int32)
CU_SEQLENS = torch.tensor([0, 2, 4], dtype=torch.int32)
CONTEXTS = torch.tensor([5, 2], dtype=torch.int32)
ROWS = [14, 15, 0, 1, 8]  # of the first request's positions


def call(function, topk=TOPK):
    q = torch.zeros(4, 2, 8)
    cache = torch.zeros(10, BLOCK, 8)
    return function(q, torch.zeros(4, 2), cache, TABLES, CU_SEQLENS, CONTEXTS, topk, 1.0)


def test_all_visible_keys_in_order():
    assert call(select_all).tolist() == [
        [14, 15, 0, 1, -1],
        [14, 15, 0, 1, 8],
        [18, -1, -1, -1, -1],
        [18, 19, -1, -1, -1],
    ]


def test_the_most_recent_keys_latest_first():
    assert call(select_recent).tolist() == [[1, 0, 15], [8, 1, 0], [18, -1, -1], [19, 18, -1]]


def test_more_keys_than_there_are_leave_the_rest_empty():
    chosen = call(select_recent, topk=6)
    assert chosen.dtype == torch.int32
    assert sorted(chosen[1].tolist()) == [-1, *sorted(ROWS)]


def test_random_keys_are_distinct_visible_and_seeded():
    draw = overrides_of("random", seed=5)[PAGED_INDEX_TOPK]
    draws = [call(draw) for _ in range(40)]
    seen = set()
    for chosen in draws:
        for row, visible in ((0, ROWS[:4]), (1, ROWS), (2, [18]), (3, [18, 19])):
            kept = [slot for slot in chosen[row].tolist() if slot >= 0]
            assert len(kept) == min(TOPK, len(visible)) == len(set(kept))
            assert set(kept) <= set(visible)
        seen.update(chosen[1].tolist())
    assert seen == set(ROWS)
    again = overrides_of("random", seed=5)[PAGED_INDEX_TOPK]
    assert all(torch.equal(chosen, call(again)) for chosen in draws)
    other = overrides_of("random", seed=6)[PAGED_INDEX_TOPK]
    assert not all(torch.equal(chosen, call(other)) for chosen in draws)


def test_an_unknown_selection_is_refused():
    with pytest.raises(UserError, match=r"unknown selection 'best'.*recent"):
        overrides_of("best")


def test_replacing_changes_copies_only(loaded):
    copies = replace_ops(loaded.regions, {PAGED_INDEX_TOPK: select_all})
    targets = [n.target for n in copies["moe.long"].graph.nodes]
    assert select_all in targets
    assert PAGED_INDEX_TOPK not in targets
    assert PAGED_INDEX_TOPK in [n.target for n in loaded.regions["moe.long"].graph.nodes]


def test_replacing_what_is_not_there_is_refused(loaded):
    with pytest.raises(UserError, match="the graphs hold no dsa"):
        replace_ops(loaded.regions, {SPARSE_ATTENTION: select_all})
