from collections.abc import Callable

import pytest
import torch

from dsa_compile.facts.config import CompileConfig
from dsa_compile.ir.passes import Numerics
from dsa_compile.passes.skip_padding import SkipPadding
from tests.passes.sketch import Sketch, batch, canonical, fragment, region, value, weight

dsa = torch.ops.dsa

EXPERTS, INNER, HIDDEN, TOP_K = 16, 128, 128, 4
CHOICE = (4, 2, TOP_K, True, 2.5)
E4M3 = torch.float8_e4m3fn


def inputs():
    return (
        value("x", "T", HIDDEN, dtype=torch.bfloat16),
        weight("mlp.gate.weight", EXPERTS, HIDDEN, dtype=torch.bfloat16),
        weight("mlp.gate.e_score_correction_bias", EXPERTS),
        weight("gate_up", EXPERTS + 1, 2 * INNER, HIDDEN, dtype=E4M3),
        weight("gate_up_scale", EXPERTS + 1, 2, 1),
        weight("down", EXPERTS + 1, HIDDEN, INNER, dtype=E4M3),
        weight("down_scale", EXPERTS + 1, 1, 1),
    )


def layer(x, gate, bias, matrices, *more):
    q = dsa.quantize_blocks.default(x, False)
    chosen = dsa.router.default(x, gate, bias, *CHOICE, *more)
    return dsa.experts_fp8.default(q[0], q[1], chosen[0], chosen[1], *matrices)


@region("moe", *inputs())
def before(x, gate, bias, *matrices):
    return layer(x, gate, bias, matrices, 1)


@region("moe", *inputs(), batch("slot_mapping", "T"))
def expected(x, gate, bias, a, b, c, d, slots):
    return layer(x, gate, bias, (a, b, c, d), 1, slots)


@region("moe", *inputs())
def without_a_shared_expert(x, gate, bias, *matrices):
    return layer(x, gate, bias, matrices)


@region("moe", *inputs(), batch("slot_mapping", "T"))
def expected_without(x, gate, bias, a, b, c, d, slots):
    return layer(x, gate, bias, (a, b, c, d), 0, slots)


@pytest.mark.parametrize(
    ("source", "wanted"), [(before, expected), (without_a_shared_expert, expected_without)]
)
def test_the_router_learns_which_tokens_are_padding(source: Sketch, wanted: Sketch) -> None:
    config = CompileConfig(recipe="fp8")
    program, after = fragment(source, config=config), fragment(wanted, config=config)
    assert SkipPadding()(program).rewrites == 2  # of two layers
    assert canonical(program.regions["moe"]) == canonical(after.regions["moe"])
    assert SkipPadding().expects(program, program.regions["moe"]) == 1


def test_a_padded_token_takes_no_expert_and_others_keep_theirs() -> None:
    x, gate = torch.randn(3, HIDDEN), torch.randn(EXPERTS, HIDDEN)
    bias = torch.zeros(EXPERTS)
    weights, indices = dsa.router(x, gate, bias, *CHOICE, 1)
    slots = torch.tensor([5, -1, 0])
    same, masked = dsa.router(x, gate, bias, *CHOICE, 1, slots)
    assert torch.equal(same, weights)
    assert torch.equal(masked[[0, 2]], indices[[0, 2]])
    assert masked[1].tolist() == [-1] * (TOP_K + 1)


def test_bits_are_not_promised() -> None:
    """An expert that padding took as well has fewer rows, whose sums some CPUs order otherwise."""
    assert SkipPadding.numerics is Numerics.TOLERANCE


def test_experts_that_cannot_skip_are_left_alone(leaves_alone: Callable[..., None]) -> None:
    @region(
        "moe",
        *inputs()[:3],
        weight("gate_up", EXPERTS, 2 * INNER, HIDDEN, dtype=torch.bfloat16),
        weight("down", EXPERTS, HIDDEN, INNER, dtype=torch.bfloat16),
    )
    def plain(x, gate, bias, gate_up, down):
        chosen = dsa.router.default(x, gate, bias, *CHOICE)
        return dsa.experts.default(x, chosen[0], chosen[1], gate_up, down)

    leaves_alone(SkipPadding(), plain)
