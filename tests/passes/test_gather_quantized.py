import torch

from dsa_compile.facts.config import CompileConfig
from dsa_compile.facts.layout import Layout
from dsa_compile.passes.gather_quantized import GatherQuantized
from tests.passes.conftest import PassCheck
from tests.passes.sketch import region, value, weight

dsa = torch.ops.dsa

E4M3 = torch.float8_e4m3fn
DP2 = CompileConfig(target="cpu", recipe="fp8", layout=Layout(dp=2))
EXPERTS, INNER, WIDTH, CHOSEN = 4, 128, 160, 2
GIVEN = {"i": torch.tensor([[0, 1], [3, 2], [1, 1]] * 4)}
OPERANDS = (
    value("x", "T", WIDTH, dtype=torch.bfloat16),
    value("w", "T", CHOSEN),
    value("i", "T", CHOSEN, dtype=torch.int64),
    weight("gate_up", EXPERTS, 2 * INNER, WIDTH, dtype=E4M3),
    weight("gate_up_scale", EXPERTS, 2, 2),
    weight("down", EXPERTS, WIDTH, INNER, dtype=E4M3),
    weight("down_scale", EXPERTS, 2, 1),
)


def test_rows_are_quantised_before_they_travel(check: PassCheck) -> None:
    """By one op, for the shared expert too."""

    @region("moe", *OPERANDS, outputs=("shared", "routed"))
    def before(x, w, i, *matrices):
        shared = dsa.quantize_blocks.default(x, True)[0]
        rows = dsa.all_gather_many.default([w, x, i], "dp", 2)
        pair = dsa.quantize_blocks.default(rows[1], True)
        sums = dsa.experts_fp8.default(pair[0], pair[1], rows[0], rows[2], *matrices)
        return shared, dsa.reduce_scatter.default(sums, "dp", 2)

    @region("moe", *OPERANDS, outputs=("shared", "routed"))
    def after(x, w, i, *matrices):
        pair = dsa.quantize_blocks.default(x, True)
        own = pair[0]
        rows = dsa.all_gather_many.default([w, own, pair[1], i], "dp", 2)
        sums = dsa.experts_fp8.default(rows[1], rows[2], rows[0], rows[3], *matrices)
        return own, dsa.reduce_scatter.default(sums, "dp", 2)

    check(GatherQuantized(), before, after, inputs=GIVEN, config=DP2)


def test_rows_that_something_else_reads_are_not_quantised(check: PassCheck) -> None:
    @region("moe", value("x", "T", WIDTH, dtype=torch.bfloat16), outputs=("q", "scale", "rows"))
    def shared(x):
        rows = dsa.all_gather_many.default([x], "dp", 2)[0]
        pair = dsa.quantize_blocks.default(rows, True)
        return pair[0], pair[1], rows

    assert "matched 0 of 1" in check.declines(GatherQuantized(), shared, config=DP2)
