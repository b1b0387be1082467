"""Each form that attention has in front of the pass; the inputs are prompts of a step."""

from itertools import product

import pytest
import torch

from dsa_compile.passes.expand_prompt_attention import ExpandPromptAttention
from tests.passes.conftest import PassCheck
from tests.passes.sketch import batch, cache, fragment, region, value, weight

aten, dsa = torch.ops.aten, torch.ops.dsa

HEADS, NOPE, ROPE, RANK, VALUES, BLOCK, TOP_K = 2, 24, 16, 256, 128, 16, 16
SCALE = 0.25
QUERY = value("q", "T", HEADS, NOPE + ROPE)
W_UK, W_UV = (
    weight("self_attn.w_uk", HEADS, NOPE, RANK),
    weight("self_attn.w_uv", HEADS, VALUES, RANK),
)
ANGLES = (value("cos", "T", ROPE), value("sin", "T", ROPE))
ROWS = value("dense_slots", "T", TOP_K, dtype=torch.int32)
BATCH = (batch("slot_mapping", "T"), batch("positions", "T"))
WIDTHS = {"": RANK + ROPE, "_fp8": RANK + 4 * RANK // 128 + 2 * ROPE, "_fp8_tensor": RANK + ROPE}
# prompts of five and two tokens, in pages out of order, and a token of padding
SLOTS = torch.tensor([32, 33, 34, 35, 36, 3, 4, -1])
DENSE = torch.full((8, TOP_K), -1, dtype=torch.int32)
for _token in range(7):
    _first = 0 if _token < 5 else 5
    DENSE[_token, : _token - _first + 1] = SLOTS[_first : _token + 1]


def rows_of(form: str) -> torch.Tensor:
    random = torch.Generator().manual_seed(0)
    values = torch.randn(3, BLOCK, RANK + ROPE, generator=random)
    if not form:
        return values
    if form == "_fp8_tensor":
        return values.to(torch.float8_e4m3fn).view(torch.uint8)
    scales = torch.rand(3, BLOCK, RANK // 128, generator=random) + 0.5
    parts = (values[..., :RANK].to(torch.float8_e4m3fn), scales, values[..., RANK:].bfloat16())
    return torch.cat([part.view(torch.uint8) for part in parts], -1)


def inputs(form: str = "") -> dict[str, torch.Tensor]:
    return {
        "slot_mapping": SLOTS,
        "positions": torch.tensor([0, 1, 2, 3, 4, 0, 1, 0]),
        "dense_slots": DENSE,
        "latent_cache": rows_of(form),
    }


def cache_of(form: str):
    dtype = torch.uint8 if form else torch.float32
    return cache("latent_cache", "P", BLOCK, WIDTHS[form], dtype=dtype)


def attends(form: str, latent, query_pe, rows, slots, scales, *rest):
    op = getattr(dsa, f"paged_latent_attention{form}" + ("_expand" if rest else "")).default
    return op(latent, query_pe, rows, slots, SCALE, *scales, *rest)


def prompt(form: str, nope, query_pe, rows, slots, positions, w_uk, w_uv, scales, selected=()):
    op = getattr(dsa, f"paged_prompt_attention{form}").default
    return op(nope, query_pe, rows, slots, positions, w_uk, w_uv, SCALE, *scales, *selected)


def rotated(q, cos, sin):
    parts = aten.split_with_sizes.default(q, [NOPE, ROPE], -1)
    return parts[0], dsa.rope_interleaved.default(parts[1], cos, sin)


def expanded(name: str, form: str, last: str):
    """The region before, and as it is expected: ``last`` is what attention goes on to.

    The long prompt variant keeps the slots, which are those of all tokens here.
    """
    selects = name.endswith("long_prompt")
    scale = (weight("latent_scale", 1),) if form == "_fp8_tensor" else ()
    given = (QUERY, W_UK, W_UV, *ANGLES, ROWS, cache_of(form), *scale)
    outputs = ("q8", "scale") if last else ("out",)

    @region(name, *given, outputs=outputs)
    def before(q, w_uk, w_uv, cos, sin, slots, rows, *scales):
        pair = dsa.absorb_rope_query.default(q, w_uk, cos, sin)
        if last == "fused":
            made = attends(form, pair[0], pair[1], rows, slots, scales, w_uv, True)
            return made[0], made[1]
        latent = attends(form, pair[0], pair[1], rows, slots, scales)
        if not last:
            return dsa.expand_output.default(latent, w_uv)
        made = dsa.expand_output_quantize.default(latent, w_uv, True)
        return made[0], made[1]

    kept = tuple(each for each in given if selects or each is not ROWS)

    @region(name, *kept, *BATCH, outputs=outputs)
    def after(q, w_uk, w_uv, cos, sin, *rest):
        selected = rest[: int(selects)]
        rows, *scales, slots, positions = rest[int(selects) :]
        nope, query_pe = rotated(q, cos, sin)
        out = prompt(form, nope, query_pe, rows, slots, positions, w_uk, w_uv, scales, selected)
        if not last:
            return out
        flat = aten.reshape.default(out, [-1, HEADS * VALUES])
        made = dsa.quantize_blocks.default(flat, True)
        return made[0], made[1]

    return before, after


@pytest.mark.parametrize(
    ("form", "last"),
    [pair for pair in product(WIDTHS, ["", "quantize", "fused"]) if pair != ("", "fused")],
)
@pytest.mark.parametrize("variant", ["prompt", "long_prompt"])
def test_attention_goes_back_to_heads(check: PassCheck, variant: str, form: str, last: str) -> None:
    before, after = expanded(f"dense.{variant}", form, last)
    given = {"inputs": inputs(form), "sizes": {"T": 8}}
    # an e4m3 that rounds the other way is off by an eighth
    relative = 0.02 if last else None
    check(ExpandPromptAttention(), before, after, **given, relative=relative)


def test_queries_that_are_not_rotated(check: PassCheck) -> None:
    given = (value("nope", "T", HEADS, NOPE), value("pe", "T", HEADS, ROPE), W_UK, W_UV)

    @region("dense.prompt", *given, ROWS, cache_of(""), outputs=("out",))
    def before(nope, pe, w_uk, w_uv, slots, rows):
        latent = dsa.absorb_query.default(nope, w_uk)
        return dsa.expand_output.default(attends("", latent, pe, rows, slots, ()), w_uv)

    @region("dense.prompt", *given, cache_of(""), *BATCH, outputs=("out",))
    def after(nope, pe, w_uk, w_uv, rows, slots, positions):
        return prompt("", nope, pe, rows, slots, positions, w_uk, w_uv, ())

    check(ExpandPromptAttention(), before, after, inputs=inputs(), sizes={"T": 8})


@pytest.mark.parametrize("name", ["dense.long", "dense.short", "dense"])
def test_other_variants_are_left(name: str) -> None:
    before, _ = expanded(name, "", "")
    program = fragment(before)
    assert ExpandPromptAttention()(program).rewrites == 0


def test_declines_a_latent_result_that_something_else_reads(check: PassCheck) -> None:
    given = (QUERY, W_UK, W_UV, *ANGLES, ROWS, cache_of(""))

    @region("dense.prompt", *given, outputs=("out", "latent"), path="attention")
    def before(q, w_uk, w_uv, cos, sin, slots, rows):
        pair = dsa.absorb_rope_query.default(q, w_uk, cos, sin)
        latent = attends("", pair[0], pair[1], rows, slots, ())
        return dsa.expand_output.default(latent, w_uv), latent

    assert check.declines(ExpandPromptAttention(), before).endswith(
        "extra user output outside the match"
    )
