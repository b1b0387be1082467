import pytest
import torch

from dsa_compile.facts.model_spec import LayerKind
from dsa_compile.ir.dims import FakeWorld
from dsa_compile.ops.signature import OperandError
from dsa_compile.passes.merge_projections import MergeProjections, first_projections
from tests.passes.conftest import PassCheck
from tests.passes.sketch import fragment, region, value, weight

aten, dsa = torch.ops.aten, torch.ops.dsa

HIDDEN = 16
Q_A, K, KV_A = "self_attn.q_a_proj", "self_attn.indexer.wk", "self_attn.kv_a_proj_with_mqa"
X = value("x", "T", HIDDEN)
ATTENTION = (
    weight(f"{Q_A}.weight", 12, HIDDEN),
    weight(f"{KV_A}.weight", 6, HIDDEN),
    weight(f"{K}.weight", 4, HIDDEN),
)
MLP = (weight("mlp.gate_proj.weight", 24, HIDDEN), weight("mlp.up_proj.weight", 24, HIDDEN))
OUTPUTS = ("q", "kv", "k", "gate", "up")
SEPARATE = region("dense", X, *ATTENTION, *MLP, outputs=OUTPUTS)(
    lambda x, *weights: tuple(dsa.linear.default(x, w) for w in weights)
)


def test_projections_of_one_input_become_one(check: PassCheck) -> None:
    @region(
        "dense",
        X,
        weight("self_attn.q_a_k_kv_a.weight", 22, HIDDEN),
        weight("mlp.gate_up_proj.weight", 48, HIDDEN),
        outputs=OUTPUTS,
    )
    def expected(x, attention, mlp):
        # the order of the plan, whatever the order of the calls
        pieces = aten.split_with_sizes.default(dsa.linear.default(x, attention), [12, 4, 6], -1)
        halves = aten.split_with_sizes.default(dsa.linear.default(x, mlp), [24, 24], -1)
        return pieces[0], pieces[2], pieces[1], halves[0], halves[1]

    check(MergeProjections(), SEPARATE, expected, rewrites=2)


def test_shared_experts_merge_too(check: PassCheck) -> None:
    shared = [weight(f"mlp.shared_experts.{n}_proj.weight", 24, HIDDEN) for n in ("gate", "up")]
    before = region("moe", X, *ATTENTION, *shared, outputs=OUTPUTS)(SEPARATE.function)

    @region(
        "moe",
        X,
        weight("self_attn.q_a_k_kv_a.weight", 22, HIDDEN),
        weight("mlp.shared_experts.gate_up_proj.weight", 48, HIDDEN),
        outputs=OUTPUTS,
    )
    def expected(x, attention, mlp):
        pieces = aten.split_with_sizes.default(dsa.linear.default(x, attention), [12, 4, 6], -1)
        halves = aten.split_with_sizes.default(dsa.linear.default(x, mlp), [24, 24], -1)
        return pieces[0], pieces[2], pieces[1], halves[0], halves[1]

    check(MergeProjections(), before, expected, rewrites=2)


def test_the_plan_concatenates_each_layers_own_weights() -> None:
    program = fragment(SEPARATE)
    MergeProjections()(program)
    merged = program.weights.entries("dense")["self_attn.q_a_k_kv_a.weight"]
    assert merged.sources(program.layers[1].vars) == tuple(
        f"model.layers.1.{name}.weight" for name in (Q_A, K, KV_A)
    )


def test_every_part_of_the_released_model_starts_on_a_128_row_block() -> None:
    rows = {f"{Q_A}.weight": 1536, f"{K}.weight": 128, f"{KV_A}.weight": 576}
    parts = first_projections(LayerKind("moe", "experts"), True)["self_attn.q_a_k_kv_a.weight"]
    starts = [sum(rows[part] for part in parts[:i]) for i in range(len(parts))]
    assert sorted(rows) == sorted(parts)
    assert [start % 128 for start in starts] == [0, 0, 0]


def test_declines_different_inputs(check: PassCheck) -> None:
    @region("dense", X, value("y", "T", HIDDEN), *ATTENTION, *MLP, outputs=OUTPUTS, path="attn")
    def before(x, y, q, kv, k, gate, up):
        return tuple(
            dsa.linear.default(a, w) for a, w in ((x, q), (x, kv), (y, k), (x, gate), (x, up))
        )

    message = check.declines(MergeProjections(), before, untouched=False)
    assert message.startswith("pass merge_projections: matched 1 of 2 sites in 'dense' (2 layers)")
    assert message.endswith(
        "attn: node linear_default: the projections of the group read different inputs: ['x', 'y']"
    )


def test_projections_of_one_input_have_one_dtype() -> None:
    """So the pass need not look: a graph in which they differ cannot be made."""
    narrow = weight("mlp.up_proj.weight", 24, HIDDEN, dtype=torch.float64)

    @region("dense", X, *ATTENTION, MLP[0], narrow, outputs=OUTPUTS, path="mlp")
    def before(x, q, kv, k, gate, up):
        return tuple(dsa.linear.default(x, w) for w in (q, kv, k, gate, up))

    with pytest.raises(OperandError, match=r"dsa::linear takes weight as float32.*not float64"):
        before.trace(FakeWorld())


def test_declines_a_weight_used_twice(check: PassCheck) -> None:
    @region("dense", X, *ATTENTION, *MLP, outputs=(*OUTPUTS, "again"), path="mlp")
    def before(x, q, kv, k, gate, up):
        linears = [dsa.linear.default(x, w) for w in (q, kv, k, gate, up)]
        return (*linears, dsa.linear.default(x, gate))

    message = check.declines(MergeProjections(), before, untouched=False)
    assert "weight mlp.gate_proj.weight is used 2 times" in message
