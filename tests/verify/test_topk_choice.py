"""Choices of keys are judged on every rank, and the worst rank counts."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from dsa_compile.facts.layout import DP
from dsa_compile.ops import INDEX_TOPK
from dsa_compile.verify.comparison.topk_choice import Choice, judge_choice
from dsa_compile.verify.execution.ranks import Ranks

TOPK = 2


def judged(q: Any, keys: Any, weights: Any, chosen: Any) -> Choice | None:
    graph = fx.Graph()
    operands = [graph.placeholder(name) for name in ("q", "keys", "weights")]
    graph.call_function(INDEX_TOPK, (*operands, TOPK, 1.0), name="choice")
    delta = SimpleNamespace(before=SimpleNamespace(nodes=list(graph.nodes)))
    values = ({"q": q, "keys": keys, "weights": weights}, {})
    step: Any = None  # of a paged cache alone
    return judge_choice(delta, ("choice", "choice"), values, chosen, step, step)  # type: ignore[arg-type]


@pytest.fixture
def operands() -> list[tuple[Tensor, Tensor, Tensor]]:
    """Queries, keys and head weights of two lanes, by which the last two of four keys are best."""
    torch.manual_seed(0)
    keys = torch.arange(1.0, 5.0)[None, :, None].expand(1, 4, 8)
    return [(torch.rand(1, 4, 3, 8), keys, torch.rand(1, 4, 3)) for _ in range(2)]


def test_the_worst_rank_counts(operands: list[tuple[Tensor, Tensor, Tensor]]) -> None:
    best = torch.tensor([[[0, -1], [1, 0], [2, 1], [3, 2]]])
    worst = torch.tensor([[[0, -1], [1, 0], [2, 1], [3, 0]]])
    alone = [judged(*operands[0], best), judged(*operands[1], worst)]
    assert alone[0] is not None
    assert alone[1] is not None
    assert (alone[0].overlap, alone[1].overlap) == (1.0, 0.5)
    lanes = [Ranks(each, DP) for each in zip(*operands, strict=True)]
    assert judged(*lanes, Ranks((best, worst), DP)) == alone[1]
    assert judged(*lanes, Ranks((best, best), DP)) in (alone[0], judged(*operands[1], best))
