from collections.abc import Callable

import torch

from dsa_compile.passes.strip_expert_sentinels import StripExpertSentinels
from tests.passes.conftest import PassCheck
from tests.passes.sketch import Sketch, region, value

aten = torch.ops.aten

EXPERTS = 16  # of the tiny model
X, IDS = value("x", 48, 8), value("ids", 12, 4, dtype=torch.int64)


def masked(experts: int) -> Sketch:
    @region("moe", X, IDS, outputs=("y", "order"))
    def before(x, ids):
        ordered = aten.sort.default(aten.reshape.default(ids, [-1]))
        away = aten.unsqueeze.default(aten.ge.Scalar(ordered[0], experts), -1)
        return aten.neg.default(aten.masked_fill.Scalar(x, away, 0.0)), ordered[1]

    return before


def test_masks_of_absent_experts_go(check: PassCheck) -> None:
    @region("moe", X, IDS, outputs=("y", "order"))
    def expected(x, ids):
        return aten.neg.default(x), aten.sort.default(aten.reshape.default(ids, [-1]))[1]

    ids = torch.randint(0, EXPERTS, (12, 4), generator=torch.Generator().manual_seed(0))
    check(StripExpertSentinels(), masked(EXPERTS), expected, inputs={"ids": ids})


def test_leaves_a_comparison_with_another_number(leaves_alone: Callable[..., None]) -> None:
    leaves_alone(StripExpertSentinels(), masked(EXPERTS - 1))
