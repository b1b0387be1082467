import torch

from dsa_compile.passes.quantize_latent_cache import QuantizeLatentCache
from tests.passes.conftest import PassCheck
from tests.passes.sketch import Sketch, batch, cache, region, value, weight

aten, dsa = torch.ops.aten, torch.ops.dsa

BF16 = torch.bfloat16
HEADS, RANK, ROPE, TOKENS, BLOCK, TOP_K = 2, 160, 16, 12, 16, 8
ROW = RANK + 2 * 4 + ROPE * 2  # values, two scales, the rotated key
EPS, SCALE = 1e-6, 0.25
INPUTS = (
    value("kv", "T", RANK + ROPE, dtype=BF16),
    value("q", "T", HEADS, RANK, dtype=BF16),
    value("q_pe", "T", HEADS, ROPE, dtype=BF16),
    value("cos", "T", ROPE, dtype=BF16),
    value("sin", "T", ROPE, dtype=BF16),
    weight("self_attn.kv_a_layernorm.weight", RANK, dtype=BF16),
)
STEP = (batch("slot_mapping", "T"), batch("rows", "T", TOP_K, dtype=torch.int32))
SLOTS = torch.randperm(3 * BLOCK, generator=torch.Generator().manual_seed(2))[:TOKENS]
PICKED = torch.stack([SLOTS.roll(-i)[:TOP_K] for i in range(TOKENS)]).int()
GIVEN = {"slot_mapping": SLOTS, "rows": PICKED.masked_fill(PICKED % 5 == 0, -1)}
CACHE = torch.full((3, BLOCK, RANK + ROPE), float("nan"), dtype=BF16)


def separate(extra: str | None = None) -> Sketch:
    @region(
        "dense",
        *INPUTS,
        *STEP,
        cache("latent_cache", "P", BLOCK, RANK + ROPE, dtype=BF16),
        outputs=("out", "extra") if extra else ("out",),
        path="self_attn",
    )
    def before(kv, q, q_pe, cos, sin, w, slots, rows, latent):
        parts = aten.split_with_sizes.default(kv, [RANK, ROPE], -1)
        ckv = dsa.rms_norm.default(parts[0], w, EPS)
        heads = aten.view.default(parts[1], [-1, 1, ROPE])
        key = aten.squeeze.dim(dsa.rope_interleaved.default(heads, cos, sin), 1)
        dsa.write_latent_cache.default(ckv, key, latent, slots)
        out = dsa.paged_latent_attention.default(q, q_pe, latent, rows, SCALE)
        return (out, {"ckv": ckv, "key": key}[extra]) if extra else out

    return before


def test_rows_are_written_and_read_in_fp8(check: PassCheck) -> None:
    @region("dense", *INPUTS, *STEP, cache("latent_cache", "P", BLOCK, ROW, dtype=torch.uint8))
    def expected(kv, q, q_pe, cos, sin, w, slots, rows, latent):
        dsa.norm_rope_write_latent_cache_fp8.default(
            kv, w, EPS, cos, sin, True, False, latent, slots
        )
        return dsa.paged_latent_attention_fp8.default(q, q_pe, latent, rows, SCALE)

    before = separate()
    check(
        QuantizeLatentCache(),
        region("dense", *before.inputs, path="self_attn")(before.function),
        expected,
        inputs={**GIVEN, "latent_cache": CACHE},
        after_inputs={"latent_cache": torch.full((3, BLOCK, ROW), 255, dtype=torch.uint8)},
        relative=0.05,
    )


def test_declines_a_latent_that_is_read_elsewhere(check: PassCheck) -> None:
    assert check.declines(QuantizeLatentCache(), separate("ckv")) == (
        "pass quantize_latent_cache: matched 0 of 1 sites in 'dense' (2 layers); nearest miss: "
        "self_attn: node rms_norm_default: extra user output outside the match"
    )


def test_declines_a_rotated_key_that_is_read_elsewhere(check: PassCheck) -> None:
    message = check.declines(QuantizeLatentCache(), separate("key"))
    assert message.endswith("self_attn: node squeeze_dim: extra user output outside the match")


def test_declines_a_key_rotated_by_other_tables(check: PassCheck) -> None:
    before = separate()

    def with_tables_swapped(kv, q, q_pe, cos, sin, *rest):
        return before.function(kv, q, q_pe, sin, cos, *rest)

    odd = region("dense", *before.inputs, outputs=("out",), path="self_attn")(with_tables_swapped)
    message = check.declines(QuantizeLatentCache(), odd)
    assert message.endswith("'cos': is sin, not the input cos")
