import torch

from dsa_compile.passes.fuse_rope_absorb import FuseRopeAbsorb
from tests.passes.conftest import PassCheck
from tests.passes.sketch import region, value, weight

aten, dsa = torch.ops.aten, torch.ops.dsa

HEADS, NOPE, ROPE, RANK = 4, 24, 16, 40
INPUTS = (
    value("q", "T", HEADS, NOPE + ROPE),
    weight("self_attn.w_uk", HEADS, NOPE, RANK),
    value("cos", "T", ROPE),
    value("sin", "T", ROPE),
)
OUTPUTS = ("q_latent", "q_pe")


def split(q):
    return aten.split_with_sizes.default(q, [NOPE, ROPE], -1)


def test_absorption_and_rotation_become_one_op(check: PassCheck) -> None:
    @region("dense", *INPUTS, outputs=OUTPUTS)
    def before(q, w_uk, cos, sin):
        parts = split(q)
        rotated = dsa.rope_interleaved.default(parts[1], cos, sin)
        return dsa.absorb_query.default(parts[0], w_uk), rotated

    @region("dense", *INPUTS, outputs=OUTPUTS)
    def expected(q, w_uk, cos, sin):
        pair = dsa.absorb_rope_query.default(q, w_uk, cos, sin)
        return pair[0], pair[1]

    check(FuseRopeAbsorb(), before, expected)


def test_declines_a_rest_that_is_not_rotated(check: PassCheck) -> None:
    @region("dense", *INPUTS[:2], outputs=OUTPUTS, path="attention")
    def before(q, w_uk):
        parts = split(q)
        return dsa.absorb_query.default(parts[0], w_uk), parts[1]

    assert check.declines(FuseRopeAbsorb(), before) == (
        "pass fuse_rope_absorb: matched 0 of 1 sites in 'dense' (2 layers); nearest miss: "
        "attention: node absorb_query_default: no rotation of the rest of q"
    )


def test_declines_a_part_that_is_read_elsewhere(check: PassCheck) -> None:
    @region("dense", *INPUTS, outputs=(*OUTPUTS, "nope"), path="attention")
    def before(q, w_uk, cos, sin):
        parts = split(q)
        nope, rotated = parts[0], dsa.rope_interleaved.default(parts[1], cos, sin)
        return dsa.absorb_query.default(nope, w_uk), rotated, nope

    assert check.declines(FuseRopeAbsorb(), before).endswith(
        "attention: node getitem: extra user output outside the match"
    )
