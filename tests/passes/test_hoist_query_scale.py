import torch

from dsa_compile.passes.hoist_query_scale import HoistQueryScale
from tests.passes.conftest import PassCheck
from tests.passes.sketch import SIZES, batch, region, value, weight

aten, dsa = torch.ops.aten, torch.ops.dsa

HEADS, NOPE, ROPE = 4, 24, 16
INPUTS = (
    value("q", "B", "S", HEADS, NOPE + ROPE),
    batch("positions", "B", "S"),
    weight("self_attn.softmax_scaling.scale", HEADS),
    weight("self_attn.softmax_scaling.bias", HEADS),
    value("cos", "B", "S", ROPE),
    value("sin", "B", "S", ROPE),
)
POSITIONS = torch.arange(SIZES["B"] * SIZES["S"]).view(SIZES["B"], SIZES["S"])
OUTPUTS = ("queries",)


def rotated(q, cos, sin):
    parts = aten.split_with_sizes.default(q, [NOPE, ROPE], -1)
    turned = dsa.rope_interleaved.default(parts[1], cos, sin)
    return aten.cat.default([parts[0], turned], -1)


def test_scales_before_the_split(check: PassCheck) -> None:
    @region("dense", *INPUTS, outputs=OUTPUTS)
    def before(q, positions, scale, bias, cos, sin):
        return dsa.scale_by_position.default(rotated(q, cos, sin), positions, scale, bias)

    @region("dense", *INPUTS, outputs=OUTPUTS)
    def expected(q, positions, scale, bias, cos, sin):
        return rotated(dsa.scale_by_position.default(q, positions, scale, bias), cos, sin)

    check(
        HoistQueryScale(),
        before,
        expected,
        inputs={"positions": POSITIONS},
        scaled_queries=True,
    )


def test_declines_queries_that_are_read_before_they_are_scaled(check: PassCheck) -> None:
    @region("dense", *INPUTS, outputs=(*OUTPUTS, "unscaled"), path="self_attn")
    def before(q, positions, scale, bias, cos, sin):
        whole = rotated(q, cos, sin)
        return dsa.scale_by_position.default(whole, positions, scale, bias), whole

    message = check.declines(HoistQueryScale(), before, scaled_queries=True)
    assert message.endswith("extra user output outside the match")
