import pytest
import torch

from dsa_compile.ir.passes import Pass, PassRecord
from dsa_compile.ir.program import Program
from dsa_compile.passes.merge_projections import MergeProjections
from dsa_compile.passes.quantize_projections import QuantizeProjections
from dsa_compile.weights.plan import (
    Concat,
    Load,
    QuantizedScales,
    QuantizedValues,
    Transpose,
    WeightEntry,
)
from tests.passes.conftest import PassCheck
from tests.passes.sketch import fragment, region, value, weight

aten, dsa = torch.ops.aten, torch.ops.dsa

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
TWO_QUANTISED_OPERANDS = 0.05  # e4m3 keeps 4 significant bits: 2.6 % each on random values
WIDTH = 160  # a whole block and a partial one
NAMES = tuple(f"self_attn.{letter}.weight" for letter in "abcdef")
X, Y = (value(name, "T", WIDTH, dtype=BF16) for name in "xy")
PLAIN = tuple(weight(name, 96, WIDTH, dtype=BF16) for name in NAMES)
OUTPUTS = tuple("abcdef")


def quantized(name: str, *shape: int):
    """The inputs that a weight of this shape becomes."""
    scales = [-(-n // 128) for n in shape]
    return weight(f"{name}_e4m3", *shape, dtype=E4M3), weight(f"{name}_scale_inv", *scales)


def linears(x, y, weights):
    """The first four of ``x``, the others of ``y``."""
    return [dsa.linear.default(y if i >= 4 else x, w) for i, w in enumerate(weights)]


PROJECTIONS = region("dense", X, Y, *PLAIN, outputs=OUTPUTS, path="attn")(
    lambda x, y, *weights: tuple(linears(x, y, weights))
)


def test_every_projection_is_quantised_and_each_input_once(check: PassCheck) -> None:
    given = [part for name in NAMES for part in quantized(name, 96, WIDTH)]

    @region("dense", X, Y, *given, outputs=OUTPUTS)
    def expected(x, y, *weights):
        pairs = [dsa.quantize_blocks.default(activations, False) for activations in (x, y)]
        parts = [(pair[0], pair[1]) for pair in pairs]
        return tuple(
            dsa.linear_fp8.default(*parts[i >= 4], weights[2 * i], weights[2 * i + 1])
            for i in range(6)
        )

    check(QuantizeProjections(), PROJECTIONS, expected, rewrites=6, relative=TWO_QUANTISED_OPERANDS)


def test_the_plan_takes_blocks_as_the_checkpoint_has_them() -> None:
    program = fragment(PROJECTIONS)
    QuantizeProjections()(program)
    entries = program.weights.entries("dense")
    load = Load("{layer}.self_attn.a.weight")
    assert entries["self_attn.a.weight_e4m3"] == WeightEntry(
        "float8_e4m3fn", (96, WIDTH), QuantizedValues(load)
    )
    assert entries["self_attn.a.weight_scale_inv"] == WeightEntry(
        "float32", (1, 2), QuantizedScales(load)
    )


@pytest.mark.parametrize("in_blocks", [True, False])
def test_merged_parts_keep_their_blocks_where_they_begin_one(in_blocks: bool) -> None:
    ranks = (128, 128, 48) if in_blocks else (48, 32, 48)
    parts = ("self_attn.q_a_proj", "self_attn.indexer.wk", "self_attn.kv_a_proj_with_mqa")
    mlp = ("mlp.gate_proj", "mlp.up_proj")
    sizes = [*zip(parts, ranks, strict=True), *((name, 192) for name in mlp)]
    more = [weight(f"extra.{i}.weight", 96, 128, dtype=BF16) for i in range(4)]

    @region(
        "dense",
        value("x", "T", 128, dtype=BF16),
        *(weight(f"{name}.weight", rows, 128, dtype=BF16) for name, rows in sizes),
        *more,
        outputs=tuple("abcdefghi"),
    )
    def before(x, *weights):
        return tuple(dsa.linear.default(x, w) for w in weights)

    program = fragment(before, q_lora_rank=ranks[0], index_head_dim=ranks[1])
    MergeProjections()(program)
    QuantizeProjections()(program)
    entries = program.weights.entries("dense")
    loads = tuple(Load(f"{{layer}}.{name}.weight") for name in parts)
    values = entries["self_attn.q_a_k_kv_a.weight_e4m3"].expr
    scales = entries["self_attn.q_a_k_kv_a.weight_scale_inv"].expr
    if in_blocks:
        assert values == Concat(0, tuple(QuantizedValues(load) for load in loads))
        assert scales == Concat(0, tuple(QuantizedScales(load) for load in loads))
    else:
        assert values == QuantizedValues(Concat(0, loads))
        assert scales == QuantizedScales(Concat(0, loads))
    # 192 rows of the gate end inside a block: the up projection cannot keep its own
    whole = Concat(0, tuple(Load(f"{{layer}}.{name}.weight") for name in mlp))
    assert entries["mlp.gate_up_proj.weight_e4m3"].expr == QuantizedValues(whole)


def test_fp32_projections_stay_as_they_are(check: PassCheck) -> None:
    fp32 = weight("self_attn.indexer.weights_proj.weight", 16, WIDTH)
    wide = value("wide", "T", WIDTH)

    @region("dense", X, Y, wide, *PLAIN, fp32, outputs=(*OUTPUTS, "g"))
    def before(x, y, wide, *weights):
        return (*linears(x, y, weights[:-1]), dsa.linear.default(wide, weights[-1]))

    program = fragment(before)
    assert QuantizeProjections()(program).by_region == {"dense": 6}
    targets = [n.target for n in program.regions["dense"].graph.nodes]
    assert targets.count(dsa.linear.default) == 1
    assert "self_attn.indexer.weights_proj.weight" in program.weights.entries("dense")


def test_the_head_stays_in_bf16() -> None:
    @region("head", X, weight("lm_head.weight", 512, WIDTH, dtype=BF16))
    def head(x, w):
        return dsa.linear.default(x, w)

    program = fragment(PROJECTIONS, head)
    assert QuantizeProjections()(program).by_region == {"dense": 6}
    assert [n.target for n in program.regions["head"].graph.nodes][2] is dsa.linear.default


class Turn(Pass):
    """Make the first weight of the transpose of a parameter."""

    def run(self, program: Program, record: PassRecord) -> None:
        """Change the plan."""
        entry = program.weights.remove("dense", NAMES[0])
        turned = Transpose(Load("{layer}.turned"), 0, 1)
        program.weights.define("dense", NAMES[0], WeightEntry(entry.dtype, entry.shape, turned))


def test_declines_a_weight_that_is_made_of_something_else(check: PassCheck) -> None:
    message = check.declines(QuantizeProjections(), PROJECTIONS, prepare=[Turn()], untouched=False)
    assert message == (
        "pass quantize_projections: matched 5 of 6 sites in 'dense' (2 layers); nearest miss: "
        "attn: node linear_default: weight self_attn.a.weight is not read as it is stored"
    )


def test_declines_a_layer_in_fp32(check: PassCheck) -> None:
    @region("dense", value("x", "T", WIDTH), weight(NAMES[0], 96, WIDTH), path="attn")
    def before(x, w):
        return dsa.linear.default(x, w)

    message = check.declines(QuantizeProjections(), before)
    assert "matched 0 of 6 sites" in message
