import pytest
import torch

from dsa_compile.passes.fuse_expand_quantize import FuseExpandQuantize
from tests.passes.conftest import PassCheck
from tests.passes.sketch import fragment, region, value, weight

aten, dsa = torch.ops.aten, torch.ops.dsa

HEADS, VALUES, RANK = 3, 128, 40
OUTPUTS = ("q", "scale")


def inputs(dtype: torch.dtype = torch.float32, values: int = VALUES):
    return (
        value("o", "T", HEADS, RANK, dtype=dtype),
        weight("self_attn.w_uv", HEADS, values, RANK, dtype=dtype),
    )


def quantized(o, w_uv, ue8m0: bool, values: int = VALUES):
    heads = dsa.expand_output.default(o, w_uv)
    return dsa.quantize_blocks.default(aten.reshape.default(heads, [-1, HEADS * values]), ue8m0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ue8m0", [False, True])
def test_product_and_quantisation_become_one_op(
    check: PassCheck, dtype: torch.dtype, ue8m0: bool
) -> None:
    @region("dense", *inputs(dtype), outputs=OUTPUTS)
    def before(o, w_uv):
        pair = quantized(o, w_uv, ue8m0)
        return pair[0], pair[1]

    @region("dense", *inputs(dtype), outputs=OUTPUTS)
    def expected(o, w_uv):
        pair = dsa.expand_output_quantize.default(o, w_uv, ue8m0)
        return pair[0], pair[1]

    check(FuseExpandQuantize(), before, expected, v_head_dim=VALUES)


def test_heads_that_share_a_block_are_left_as_they_are() -> None:
    @region("dense", *inputs(values=64), outputs=OUTPUTS)
    def before(o, w_uv):
        pair = quantized(o, w_uv, True, 64)
        return pair[0], pair[1]

    program = fragment(before, v_head_dim=64)
    record = FuseExpandQuantize()(program)
    assert (record.rewrites, record.expected) == (0, 0)
    assert "heads of 64 values, not whole blocks of 128" in str(record.near_misses[0])


def test_declines_a_result_that_is_read_elsewhere(check: PassCheck) -> None:
    @region("dense", *inputs(), outputs=(*OUTPUTS, "heads"), path="attention")
    def before(o, w_uv):
        heads = dsa.expand_output.default(o, w_uv)
        flat = aten.reshape.default(heads, [-1, HEADS * VALUES])
        pair = dsa.quantize_blocks.default(flat, True)
        return pair[0], pair[1], heads

    message = check.declines(FuseExpandQuantize(), before, v_head_dim=VALUES)
    assert message.endswith(
        "attention: node expand_output_default: extra user output outside the match"
    )
