import torch

from dsa_compile.facts.config import CompileConfig
from dsa_compile.passes.compile_pointwise import CompilePointwise
from tests.passes.conftest import PassCheck
from tests.passes.sketch import Sketch, fragment, region, value

aten, dsa = torch.ops.aten, torch.ops.dsa

GPU = CompileConfig(target="sm_90a")
HEADS, DIM, ROPE = 3, 24, 16
INPUTS = (
    value("x", "T", HEADS * DIM),
    value("cos", "T", ROPE),
    value("sin", "T", ROPE),
    value("y", "T", HEADS * DIM),
)
ROTATION = (
    '{"inputs": 3, "calls": [["aten.view.default", ["%0", [-1, 3, 24]]], '
    '["aten.split_with_sizes.default", ["%3", [16, 8], -1]], '
    '["getitem", ["%4", 0]], ["getitem", ["%4", 1]], '
    '["dsa.rope_half.default", ["%5", "%1", "%2"]], '
    '["aten.cat.default", [["%7", "%6"], -1]]], "results": ["%8"]}'
)


@region("dense", *INPUTS, outputs=("out",))
def rotated(x, cos, sin, y):
    parts = aten.split_with_sizes.default(aten.view.default(x, [-1, HEADS, DIM]), [16, 8], -1)
    low, rest = parts[0], parts[1]
    joined = aten.cat.default([dsa.rope_half.default(low, cos, sin), rest], -1)
    return dsa.linear.default(aten.view.default(joined, [-1, HEADS * DIM]), y)


def test_views_and_joins_between_calls_belong_to_the_chain(check: PassCheck) -> None:
    @region("dense", *INPUTS, outputs=("out",))
    def expected(x, cos, sin, y):
        joined = dsa.pointwise.default([x, cos, sin], ROTATION)[0]
        return dsa.linear.default(aten.view.default(joined, [-1, HEADS * DIM]), y)

    check(CompilePointwise(), rotated, expected, config=GPU)


def test_a_value_read_elsewhere_is_a_result(check: PassCheck) -> None:
    @region("dense", *INPUTS, outputs=("out", "half"))
    def before(x, cos, sin, y):
        half = aten.mul.Tensor(x, 0.5)
        return aten.silu.default(aten.add.Tensor(half, y)), aten.sum.dim_IntList(half, [1])

    @region("dense", *INPUTS, outputs=("out", "half"))
    def expected(x, cos, sin, y):
        both = dsa.pointwise.default(
            [x, y],
            '{"inputs": 2, "calls": [["aten.mul.Tensor", ["%0", 0.5]], '
            '["aten.add.Tensor", ["%2", "%1"]], ["aten.silu.default", ["%3"]]], '
            '"results": ["%2", "%4"]}',
        )
        return both[1], aten.sum.dim_IntList(both[0], [1])

    check(CompilePointwise(), before, expected, config=GPU)


def test_a_chain_does_not_go_around_another_call(check: PassCheck) -> None:
    """``norm`` reads the first call and feeds the last: one op of both would wait for itself."""

    @region("dense", *INPUTS, outputs=("out",))
    def before(x, cos, sin, y):
        half = aten.mul.Tensor(x, 0.5)
        total = aten.sum.dim_IntList(half, [1], True)
        return aten.silu.default(aten.neg.default(aten.add.Tensor(half, total)))

    @region("dense", *INPUTS, outputs=("out",))
    def expected(x, cos, sin, y):
        half = aten.mul.Tensor(x, 0.5)
        total = aten.sum.dim_IntList(half, [1], True)
        return dsa.pointwise.default(
            [half, total],
            '{"inputs": 2, "calls": [["aten.add.Tensor", ["%0", "%1"]], '
            '["aten.neg.default", ["%2"]], ["aten.silu.default", ["%3"]]], "results": ["%4"]}',
        )[0]

    check(CompilePointwise(), before, expected, config=GPU)


def untouched(before: Sketch, config: CompileConfig) -> None:
    program = fragment(before, config=config)
    assert CompilePointwise()(program).rewrites == 0


def test_one_call_is_no_chain() -> None:
    @region("dense", *INPUTS, outputs=("out",))
    def before(x, cos, sin, y):
        return aten.mul.Tensor(aten.view.default(x, [-1, HEADS, DIM]), 0.5)

    untouched(before, GPU)


def test_for_a_cpu_nothing_is_compiled() -> None:
    assert not CompilePointwise().runs(CompileConfig())
    assert CompilePointwise().runs(CompileConfig(target="sm_100a"))
