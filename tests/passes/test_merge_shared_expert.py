import pytest
import torch

from dsa_compile.passes.fuse_swiglu_quantize import FuseSwigluQuantize
from dsa_compile.passes.merge_projections import MergeProjections
from dsa_compile.passes.merge_shared_expert import MergeSharedExpert
from dsa_compile.passes.pack_swiglu import PackSwiglu
from dsa_compile.passes.quantize_experts import QuantizeExperts
from dsa_compile.passes.quantize_projections import QuantizeProjections
from dsa_compile.weights.plan import (
    Concat,
    Load,
    QuantizedScales,
    QuantizedValues,
    Reshape,
    WeightEntry,
)
from tests.passes.conftest import PassCheck
from tests.passes.sketch import fragment, region, value, weight

aten, dsa = torch.ops.aten, torch.ops.dsa

# those of the tiny model, whose parameters the plan names
EXPERTS, INNER, HIDDEN = 16, 64, 128
GATE_UP, DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
SHARED = "mlp.shared_experts"
CHOICE = (4, 2, 4, True, 2.5)


def inputs(dtype: torch.dtype = torch.float32, shared_inner: int = INNER):
    def matrix(key: str, *shape: int):
        return weight(key, *shape, dtype=dtype)

    return (
        value("x", "T", HIDDEN, dtype=dtype),
        matrix("mlp.gate.weight", EXPERTS, HIDDEN),
        weight("mlp.gate.e_score_correction_bias", EXPERTS),
        matrix(GATE_UP, EXPERTS, 2 * INNER, HIDDEN),
        matrix(DOWN, EXPERTS, HIDDEN, INNER),
        matrix(f"{SHARED}.gate_up_proj.weight", 2 * shared_inner, HIDDEN),
        matrix(f"{SHARED}.down_proj.weight", HIDDEN, shared_inner),
    )


def layer(x, gate, bias, gate_up, down, shared_gate_up, shared_down, swapped=False):
    chosen = dsa.router.default(x, gate, bias, *CHOICE)
    routed = dsa.experts.default(x, chosen[0], chosen[1], gate_up, down)
    hidden = dsa.swiglu_packed.default(dsa.linear.default(x, shared_gate_up))
    shared = dsa.linear.default(hidden, shared_down)
    return aten.add.Tensor(shared, routed) if swapped else aten.add.Tensor(routed, shared)


@pytest.mark.parametrize("swapped", [False, True])
def test_the_shared_expert_becomes_the_last_of_the_grouped_ones(
    check: PassCheck, swapped: bool
) -> None:
    @region("moe", *inputs())
    def before(*operands):
        return layer(*operands, swapped=swapped)

    @region(
        "moe",
        *inputs()[:3],
        weight(f"{GATE_UP}_and_shared", EXPERTS + 1, 2 * INNER, HIDDEN),
        weight(f"{DOWN}_and_shared", EXPERTS + 1, HIDDEN, INNER),
    )
    def expected(x, gate, bias, gate_up, down):
        chosen = dsa.router.default(x, gate, bias, *CHOICE, 1)
        return dsa.experts.default(x, chosen[0], chosen[1], gate_up, down)

    check(MergeSharedExpert(), before, expected, relative=1e-6)


def test_its_own_blocks_stay_those_of_the_checkpoint() -> None:
    """Weights stored in FP8 are stacked as stored: no part is quantised together with another."""
    bf16 = torch.bfloat16

    @region(
        "moe",
        *inputs(bf16)[:5],
        weight(f"{SHARED}.gate_proj.weight", INNER, HIDDEN, dtype=bf16),
        weight(f"{SHARED}.up_proj.weight", INNER, HIDDEN, dtype=bf16),
        weight(f"{SHARED}.down_proj.weight", HIDDEN, INNER, dtype=bf16),
    )
    def before(x, gate, bias, gate_up, down, shared_gate, shared_up, shared_down):
        chosen = dsa.router.default(x, gate, bias, *CHOICE)
        routed = dsa.experts.default(x, chosen[0], chosen[1], gate_up, down)
        pair = dsa.linear.default(x, shared_gate), dsa.linear.default(x, shared_up)
        shared = dsa.linear.default(dsa.swiglu.default(*pair), shared_down)
        return aten.add.Tensor(routed, shared)

    program = fragment(before)
    steps = (MergeProjections(), PackSwiglu(), MergeSharedExpert(), QuantizeExperts())
    for step in steps:
        step(program, limit=2)  # makes no promise of sites
    made = program.weights.entries("moe")
    shared = {n: Load(f"{{layer}}.{SHARED}.{n}_proj.weight") for n in ("gate", "up", "down")}
    gate_up, down = (Load(f"{{layer}}.{name}") for name in (GATE_UP, DOWN))

    for suffix, make, dtype, rows, columns in (
        ("e4m3", QuantizedValues, "float8_e4m3fn", 2 * INNER, HIDDEN),
        ("scale_inv", QuantizedScales, "float32", 2, 1),
    ):
        pair = Concat(0, (make(shared["gate"]), make(shared["up"])))
        expr = Concat(0, (make(gate_up, 2), Reshape((1, rows, columns), pair)))
        assert made[f"{GATE_UP}_and_shared_{suffix}"] == WeightEntry(
            dtype, (EXPERTS + 1, rows, columns), expr
        )
    last = Reshape((1, HIDDEN, INNER), QuantizedValues(shared["down"]))
    assert made[f"{DOWN}_and_shared_e4m3"].expr == Concat(0, (QuantizedValues(down), last))


def test_later_passes_do_not_expect_it_any_more() -> None:
    before = region("moe", *inputs())(layer)
    dense = region("dense", value("x", "T", HIDDEN))(lambda x: aten.neg.default(x))
    program = fragment(before, dense)
    regions = program.regions
    counts = [(QuantizeProjections(), 6, 4), (FuseSwigluQuantize(), 1, 0)]
    for pass_, apart, _ in counts:
        assert pass_.expects(program, regions["moe"]) == apart
    MergeSharedExpert()(program)
    for pass_, apart, merged in counts:
        assert pass_.expects(program, regions["moe"]) == merged
        assert pass_.expects(program, regions["dense"]) == apart


def test_declines_a_shared_expert_of_another_width(check: PassCheck) -> None:
    before = region("moe", *inputs(shared_inner=2 * INNER), path="mlp")(layer)
    assert check.declines(MergeSharedExpert(), before) == (
        "pass merge_shared_expert: matched 0 of 1 sites in 'moe' (2 layers); nearest miss: "
        f"mlp: node add_tensor: adds an expert float32[{4 * INNER}, {HIDDEN}] to experts "
        f"float32[{EXPERTS}, {2 * INNER}, {HIDDEN}]"
    )


def test_several_shared_experts_are_left_as_they_are() -> None:
    before = region("moe", *inputs(shared_inner=2 * INNER), path="mlp")(layer)
    program = fragment(before, n_shared_experts=2)
    assert MergeSharedExpert()(program).expected == 0
    targets = [node.target for node in program.regions["moe"].graph.nodes]
    assert aten.add.Tensor in targets
