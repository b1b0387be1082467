import torch

from dsa_compile.facts.config import CompileConfig
from dsa_compile.facts.layout import Layout
from dsa_compile.passes.join_all_gathers import JoinAllGathers
from tests.passes.conftest import PassCheck
from tests.passes.sketch import region, value, weight

dsa = torch.ops.dsa

LANES = CompileConfig(target="cpu", layout=Layout(dp=2, ep=2))
EXPERTS, INNER, WIDTH, CHOSEN = 4, 16, 24, 2
GIVEN = {
    "i": torch.tensor([[0, 1], [3, 2], [1, 1]] * 4),
    "places": torch.tensor([0, 1, -1, -1]),
}
OPERANDS = (
    value("x", "T", WIDTH),
    value("w", "T", CHOSEN),
    value("i", "T", CHOSEN, dtype=torch.int64),
    weight("places", EXPERTS, dtype=torch.int64),
    weight("gate_up", EXPERTS, 2 * INNER, WIDTH),
    weight("down", EXPERTS, WIDTH, INNER),
)


def gathered(x: torch.Tensor) -> torch.Tensor:
    return dsa.all_gather_rows.default(x, "dp", 2)


def test_tokens_weights_and_choices_travel_together(check: PassCheck) -> None:
    @region("moe", *OPERANDS)
    def before(x, w, i, places, *matrices):
        rows = [gathered(each) for each in (x, w, i)]
        own = dsa.place_experts.default(rows[2], places)
        sums = dsa.experts.default(rows[0], rows[1], own, *matrices)
        return dsa.reduce_scatter.default(sums, "dp", 2)

    @region("moe", *OPERANDS)
    def after(x, w, i, places, *matrices):
        rows = dsa.all_gather_many.default([x, w, i], "dp", 2)
        every = rows[0], rows[1], rows[2]
        own = dsa.place_experts.default(every[2], places)
        sums = dsa.experts.default(every[0], every[1], own, *matrices)
        return dsa.reduce_scatter.default(sums, "dp", 2)

    check(JoinAllGathers(), before, after, inputs=GIVEN, config=LANES)


def test_rows_that_are_read_before_the_others_stay_apart(check: PassCheck) -> None:
    @region("moe", *OPERANDS)
    def before(x, w, i, places, *matrices):
        own = dsa.place_experts.default(gathered(i), places)
        doubled = torch.ops.aten.add.Tensor(x, x)
        sums = dsa.experts.default(gathered(doubled), gathered(w), own, *matrices)
        return dsa.reduce_scatter.default(sums, "dp", 2)

    message = check.declines(JoinAllGathers(), before, config=LANES)
    assert "reads gathered rows before" in message
