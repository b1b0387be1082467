import pytest
import torch

from dsa_compile.ops.fused_cache import fp8_row_bytes
from dsa_compile.passes.fuse_attention_inputs import FuseAttentionInputs
from tests.passes.conftest import PassCheck
from tests.passes.sketch import Sketch, batch, cache, region, value, weight

aten, dsa = torch.ops.aten, torch.ops.dsa

BF16, U8 = torch.bfloat16, torch.uint8
QUERY, KEY, RANK, ROPE, TOKENS, BLOCK, EPS = 96, 32, 64, 16, 12, 16, 1e-6
ROW = fp8_row_bytes(RANK, ROPE)
INPUTS = (
    value("merged", "T", QUERY + KEY + RANK + ROPE, dtype=BF16),
    value("cos", "T", ROPE, dtype=BF16),
    value("sin", "T", ROPE, dtype=BF16),
    weight("q.weight", QUERY, dtype=BF16),
    weight("k.weight", KEY, dtype=BF16),
    weight("k.bias", KEY, dtype=BF16),
    weight("kv.weight", RANK, dtype=BF16),
    batch("slot_mapping", "T"),
    cache("latent_cache", "P", BLOCK, ROW, dtype=U8),
    cache("index_cache", "P", BLOCK, KEY + 4, dtype=U8),
)
OUTPUTS = ("q", "scale", "latent", "index")
GIVEN = {
    "slot_mapping": torch.randperm(3 * BLOCK, generator=torch.Generator().manual_seed(3))[:TOKENS],
    "latent_cache": torch.zeros(3, BLOCK, ROW, dtype=U8),
    "index_cache": torch.zeros(3, BLOCK, KEY + 4, dtype=U8),
}


def results(q, scale, latent, index):
    """Results of the op, and the caches after it."""
    return q, scale, aten.clone.default(latent), aten.clone.default(index)


def separate(row_scales: bool = False, tables_swapped: bool = False, keep: bool = False) -> Sketch:
    @region("dense", *INPUTS, outputs=(*OUTPUTS, "part") if keep else OUTPUTS, path="self_attn")
    def before(y, cos, sin, wq, wk, bk, wkv, slots, latent, index):
        parts = aten.split_with_sizes.default(y, [QUERY, KEY, RANK + ROPE], -1)
        pair = dsa.rms_norm_quantize.default(parts[0], wq, EPS, False)
        tables = (sin, cos) if tables_swapped else (cos, sin)
        key = parts[1]
        dsa.write_index_key_fp8.default(key, wk, bk, EPS, *tables, False, index, slots)
        dsa.norm_rope_write_latent_cache_fp8.default(
            parts[2], wkv, EPS, cos, sin, True, row_scales, latent, slots
        )
        made = results(pair[0], pair[1], latent, index)
        return (*made, aten.clone.default(key)) if keep else made

    return before


def test_three_consumers_of_one_projection_become_one_op(check: PassCheck) -> None:
    @region("dense", *INPUTS, outputs=OUTPUTS)
    def expected(y, cos, sin, wq, wk, bk, wkv, slots, latent, index):
        pair = dsa.attention_inputs_fp8.default(
            *(y, wq, EPS, wk, bk, EPS, wkv, EPS, cos, sin, True, False, False),
            *(latent, index, slots),
        )
        return results(pair[0], pair[1], latent, index)

    check(FuseAttentionInputs(), separate(), expected, inputs=GIVEN, sizes={"P": 3})


def test_rows_under_one_scale_bring_it(check: PassCheck) -> None:
    rows = cache("latent_cache", "P", BLOCK, RANK + ROPE, dtype=U8)
    inputs = (
        *(rows if i.key == "latent_cache" else i for i in INPUTS),
        weight("self_attn.kv_scale", 1),
    )
    given = {**GIVEN, "latent_cache": torch.zeros(3, BLOCK, RANK + ROPE, dtype=U8)}

    @region("dense", *inputs, outputs=OUTPUTS, path="self_attn")
    def before(y, cos, sin, wq, wk, bk, wkv, slots, latent, index, one):
        parts = aten.split_with_sizes.default(y, [QUERY, KEY, RANK + ROPE], -1)
        pair = dsa.rms_norm_quantize.default(parts[0], wq, EPS, True)
        dsa.write_index_key_fp8.default(parts[1], wk, bk, EPS, cos, sin, False, index, slots)
        dsa.norm_rope_write_latent_cache_fp8_tensor.default(
            parts[2], wkv, EPS, cos, sin, True, one, latent, slots
        )
        return results(pair[0], pair[1], latent, index)

    @region("dense", *inputs, outputs=OUTPUTS)
    def expected(y, cos, sin, wq, wk, bk, wkv, slots, latent, index, one):
        pair = dsa.attention_inputs_fp8.default(
            *(y, wq, EPS, wk, bk, EPS, wkv, EPS, cos, sin, True, False, True),
            *(latent, index, slots, one),
        )
        return results(pair[0], pair[1], latent, index)

    check(FuseAttentionInputs(), before, expected, inputs=given, sizes={"P": 3})


def test_declines_scales_of_two_formats(check: PassCheck) -> None:
    assert check.declines(FuseAttentionInputs(), separate(row_scales=True)) == (
        "pass fuse_attention_inputs: matched 0 of 1 sites in 'dense' (2 layers); nearest miss: "
        "self_attn: node norm_rope_write_latent_cache_fp8_default: "
        "scales of the query ue8m0=False, of the row True"
    )


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ({"tables_swapped": True}, "key and row differ in cos"),
        ({"keep": True}, "extra user clone_default_2 outside the match"),
    ],
)
def test_declines(check: PassCheck, how: dict[str, bool], reason: str) -> None:
    assert check.declines(FuseAttentionInputs(), separate(**how)).endswith(reason)
