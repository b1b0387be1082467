import pytest
import torch

from dsa_compile.facts.config import CompileConfig
from dsa_compile.ops.fused_cache import fp8_row_bytes
from dsa_compile.ops.quantize import E4M3
from dsa_compile.passes.fuse_attention_expand import FuseAttentionExpand
from tests.passes.conftest import PassCheck
from tests.passes.sketch import Sketch, batch, cache, fragment, region, value, weight

dsa = torch.ops.dsa

HEADS, RANK, ROPE, ROWS = 3, 128, 8, 5
SCALE = 0.25
OUTPUTS = ("q", "scale")
INPUTS = (
    value("q_latent", "T", HEADS, RANK),
    value("q_pe", "T", HEADS, ROPE),
    batch("slots", "T", ROWS, dtype=torch.int32),
    weight("self_attn.w_uv", HEADS, 128, RANK),
)
FP8 = cache("latent_cache", "P", 4, fp8_row_bytes(RANK, ROPE), dtype=torch.uint8)
TENSOR = cache("latent_cache", "P", 4, RANK + ROPE, dtype=torch.float8_e4m3fn)


def given(name: str) -> dict[str, torch.Tensor]:
    """Twelve rows in a format, and slots of twelve tokens, some of them absent."""
    torch.manual_seed(0)
    latent, rope = torch.randn(12, RANK).to(E4M3), torch.randn(12, ROPE)
    fp8 = [latent, torch.rand(12, 1), rope.bfloat16()]
    parts = fp8 if name == "fp8" else [latent, rope.to(E4M3)]
    rows = torch.cat([part.view(torch.uint8) for part in parts], 1).view(3, 4, -1)
    slots = torch.stack([torch.randperm(12)[:ROWS] for _ in range(12)]).int()
    slots[3, 2:], slots[5] = -1, -1
    return {"latent_cache": rows if name == "fp8" else rows.view(E4M3), "slots": slots}


@pytest.mark.parametrize("ue8m0", [False, True])
def test_rows_with_scales(check: PassCheck, ue8m0: bool) -> None:
    @region("dense", *INPUTS, FP8, outputs=OUTPUTS)
    def before(q_latent, q_pe, slots, w_uv, latent):
        o = dsa.paged_latent_attention_fp8.default(q_latent, q_pe, latent, slots, SCALE)
        pair = dsa.expand_output_quantize.default(o, w_uv, ue8m0)
        return pair[0], pair[1]

    @region("dense", *INPUTS, FP8, outputs=OUTPUTS)
    def expected(q_latent, q_pe, slots, w_uv, latent):
        args = (q_latent, q_pe, latent, slots, SCALE, w_uv, ue8m0)
        pair = dsa.paged_latent_attention_fp8_expand.default(*args)
        return pair[0], pair[1]

    check(FuseAttentionExpand(), before, expected, inputs=given("fp8"), v_head_dim=128)


def test_rows_under_one_scale(check: PassCheck) -> None:
    scale = weight("self_attn.kv_scale", 1)

    @region("dense", *INPUTS, TENSOR, scale, outputs=OUTPUTS)
    def before(q_latent, q_pe, slots, w_uv, latent, unit):
        args = (q_latent, q_pe, latent, slots, SCALE, unit)
        o = dsa.paged_latent_attention_fp8_tensor.default(*args)
        pair = dsa.expand_output_quantize.default(o, w_uv, True)
        return pair[0], pair[1]

    @region("dense", *INPUTS, TENSOR, scale, outputs=OUTPUTS)
    def expected(q_latent, q_pe, slots, w_uv, latent, unit):
        args = (q_latent, q_pe, latent, slots, SCALE, unit, w_uv, True)
        pair = dsa.paged_latent_attention_fp8_tensor_expand.default(*args)
        return pair[0], pair[1]

    check(FuseAttentionExpand(), before, expected, inputs=given("tensor"), v_head_dim=128)


def test_heads_that_are_not_whole_blocks_are_not_expected() -> None:
    @region("dense", *INPUTS, FP8, outputs=("o",))
    def before(q_latent, q_pe, slots, w_uv, latent):
        return dsa.paged_latent_attention_fp8.default(q_latent, q_pe, latent, slots, SCALE)

    record = FuseAttentionExpand()(fragment(before, v_head_dim=64))
    assert (record.rewrites, record.expected) == (0, 0)


def released(width: int) -> Sketch:
    """Attention and product at the released geometry, but for the width of a head's values."""
    fp8 = cache("latent_cache", "P", 64, fp8_row_bytes(512, 64), dtype=torch.uint8)

    @region(
        "dense",
        value("q_latent", "T", 128, 512, dtype=torch.bfloat16),
        value("q_pe", "T", 128, 64, dtype=torch.bfloat16),
        batch("slots", "T", 2048, dtype=torch.int32),
        weight("self_attn.w_uv", 128, width, 512, dtype=torch.bfloat16),
        fp8,
        outputs=OUTPUTS,
    )
    def made(q_latent, q_pe, slots, w_uv, latent):
        o = dsa.paged_latent_attention_fp8.default(q_latent, q_pe, latent, slots, SCALE)
        pair = dsa.expand_output_quantize.default(o, w_uv, True)
        return pair[0], pair[1]

    return made


@pytest.mark.parametrize(
    ("target", "width", "kernels", "fused"),
    [
        ("sm_90a", 128, (), True),
        ("sm_90a", 256, (), False),  # attention would go from CUDA to Triton
        ("sm_90a", 256, ("paged_latent_attention_fp8_expand=triton",), True),
        ("sm_100a", 128, (), False),
        ("cpu", 256, (), True),
    ],
)
def test_each_op_keeps_its_kernel_where_only_the_fallback_does_both(
    target: str, width: int, kernels: tuple[str, ...], fused: bool
) -> None:
    config = CompileConfig(recipe="fp8", target=target, kernels=kernels)
    program = fragment(released(width), config=config, v_head_dim=width)
    record = FuseAttentionExpand()(program)
    assert record.rewrites == record.expected == 2 * fused
    reasons = {miss.reason for miss in record.near_misses}
    said = (
        "nothing but the fallback kernel takes paged_latent_attention_fp8_expand, and "
        f"{'expand_output_quantize' if target == 'sm_100a' else 'paged_latent_attention_fp8'} "
        "has a better one"
    )
    assert (said in reasons) is not fused


def test_declines_a_result_that_is_read_elsewhere(check: PassCheck) -> None:
    @region("dense", *INPUTS, FP8, outputs=(*OUTPUTS, "o"), path="attention")
    def before(q_latent, q_pe, slots, w_uv, latent):
        o = dsa.paged_latent_attention_fp8.default(q_latent, q_pe, latent, slots, SCALE)
        pair = dsa.expand_output_quantize.default(o, w_uv, True)
        return pair[0], pair[1], o

    message = check.declines(FuseAttentionExpand(), before, v_head_dim=128)
    assert message.endswith(
        "attention: node paged_latent_attention_fp8_default: extra user output outside the match"
    )
