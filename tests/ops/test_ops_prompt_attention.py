"""Attention of prompts is absorbed attention to every visible row, and blind to all others."""

import pytest
import torch

from tests.ops.test_ops_attention_fp8 import fp8_cache

dsa = torch.ops.dsa
R, DR, H, DN, DV = 256, 16, 3, 24, 40
SCALE = 0.2

MIXES = {
    "one": ([9], 0),
    "one-token": ([1], 0),
    "padded": ([5], 3),
    "several": ([4, 1, 12, 7], 2),
    "only-padding": ([], 4),
    "empty": ([], 0),
}


@pytest.fixture(params=MIXES)
def step(request, paged_batch):
    lengths, padding = MIXES[request.param]
    return paged_batch([(n, n) for n in lengths], padding=padding)


def operands(step, dtype=torch.float32):
    tokens = step.num_tokens
    q_nope, q_pe = torch.randn(tokens, H, DN), torch.randn(tokens, H, DR)
    w_uk, w_uv = torch.randn(H, DN, R) / 16, torch.randn(H, DV, R) / 16
    return [each.to(dtype) for each in (q_nope, q_pe, w_uk, w_uv)]


def slots_of(step):
    seen = [step.visible(token) for token in range(step.num_tokens)]
    width = max(map(len, seen), default=0)
    listed = [rows + [-1] * (width - len(rows)) for rows in seen]
    return torch.tensor(listed, dtype=torch.int32).view(step.num_tokens, width)


def absorbed(step, q_nope, q_pe, w_uk, w_uv, attend):
    latent = attend(dsa.absorb_query(q_nope, w_uk), q_pe, slots_of(step))
    return dsa.expand_output(latent, w_uv)


def test_agrees_with_absorbed_attention(step):
    q_nope, q_pe, w_uk, w_uv = operands(step)
    cache = torch.randn(step.num_blocks, step.block_size, R + DR)
    at = (step.slot_mapping, step.positions)
    got = dsa.paged_prompt_attention(q_nope, q_pe, cache, *at, w_uk, w_uv, SCALE)
    expected = absorbed(
        step, q_nope, q_pe, w_uk, w_uv,
        lambda q, pe, slots: dsa.paged_latent_attention(q, pe, cache, slots, SCALE),
    )  # fmt: skip
    torch.testing.assert_close(got, expected)


def test_fp8_rows_are_dequantised(step):
    q_nope, q_pe, w_uk, w_uv = operands(step)
    cache = fp8_cache(4 * step.num_blocks)
    at = (step.slot_mapping, step.positions)
    got = dsa.paged_prompt_attention_fp8(q_nope, q_pe, cache, *at, w_uk, w_uv, SCALE)
    expected = absorbed(
        step, q_nope, q_pe, w_uk, w_uv,
        lambda q, pe, slots: dsa.paged_latent_attention_fp8(q, pe, cache, slots, SCALE),
    )  # fmt: skip
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("as_bytes", [True, False])
def test_rows_under_one_scale_are_dequantised(step, as_bytes):
    q_nope, q_pe, w_uk, w_uv = operands(step)
    cache = torch.randn(step.num_blocks, step.block_size, R + DR).to(torch.float8_e4m3fn)
    scale = torch.tensor([0.7])
    at = (step.slot_mapping, step.positions)
    expected = dsa.paged_prompt_attention(
        q_nope, q_pe, cache.float() * scale, *at, w_uk, w_uv, SCALE
    )
    cache = cache.view(torch.uint8) if as_bytes else cache
    got = dsa.paged_prompt_attention_fp8_tensor(q_nope, q_pe, cache, *at, w_uk, w_uv, SCALE, scale)
    torch.testing.assert_close(got, expected)


def some_of(slots, step, most):
    """At most so many of the slots of each token, in any order, and others that do not count."""
    order = torch.rand(slots.shape).masked_fill(slots < 0, 2).argsort(1)
    kept = slots.gather(1, order)[:, :most].contiguous()
    strangers = torch.randint(-3, 2 * step.num_blocks * step.block_size, slots.shape).int()
    seen = (strangers[:, :, None] == slots[:, None]).any(-1)
    return kept, torch.cat((strangers.masked_fill(seen, -1), kept), 1)


@pytest.mark.parametrize("form", ["", "_fp8", "_fp8_tensor"])
def test_tokens_attend_to_what_is_selected(step, form):
    """Rows of other requests, of later tokens, of nobody and outside of the cache do not count."""
    q_nope, q_pe, w_uk, w_uv = operands(step)
    kept, given = some_of(slots_of(step), step, 3)
    cache = torch.randn(step.num_blocks, step.block_size, R + DR)
    scale = ()
    if form == "_fp8":
        cache = fp8_cache(4 * step.num_blocks)
    elif form:
        cache, scale = cache.to(torch.float8_e4m3fn), (torch.tensor([0.7]),)
    args = (q_nope, q_pe, cache, step.slot_mapping, step.positions, w_uk, w_uv, SCALE, *scale)
    got = getattr(dsa, f"paged_prompt_attention{form}")(*args, given)
    attend = getattr(dsa, f"paged_latent_attention{form}")
    expected = absorbed(
        step, q_nope, q_pe, w_uk, w_uv,
        lambda q, pe, _: attend(q, pe, cache, kept, SCALE, *scale),
    )  # fmt: skip
    torch.testing.assert_close(got, expected)
    whole = getattr(dsa, f"paged_prompt_attention{form}")
    torch.testing.assert_close(whole(*args, slots_of(step)), whole(*args))


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf")], ids=str)
@pytest.mark.parametrize("selects", [False, True])
def test_a_row_without_numbers_reaches_only_what_attends_to_it(paged_batch, selects, wrong):
    step = paged_batch([(4, 4), (6, 6), (5, 5)], padding=2)
    q_nope, q_pe, w_uk, w_uv = operands(step)
    cache = torch.randn(step.num_blocks, step.block_size, R + DR)
    args = (step.slot_mapping, step.positions, w_uk, w_uv, SCALE)
    args += (slots_of(step),) if selects else ()
    want = dsa.paged_prompt_attention(q_nope, q_pe, cache, *args)
    cache.view(-1, R + DR)[step.slot_mapping[6], 5] = wrong
    got = dsa.paged_prompt_attention(q_nope, q_pe, cache, *args)
    assert got[6:10].isnan().all()
    want[6:10] = torch.nan
    torch.testing.assert_close(got, want, equal_nan=True)


def test_a_token_that_selects_nothing_is_zero(paged_batch):
    step = paged_batch([(3, 3)])
    q_nope, q_pe, w_uk, w_uv = operands(step)
    cache = torch.randn(step.num_blocks, step.block_size, R + DR)
    slots = slots_of(step)
    slots[1] = -1
    args = (q_nope, q_pe, cache, step.slot_mapping, step.positions, w_uk, w_uv, SCALE)
    got = dsa.paged_prompt_attention(*args, slots)
    assert (got[1] == 0).all()
    torch.testing.assert_close(got[::2], dsa.paged_prompt_attention(*args)[::2])


def test_rows_of_others_and_of_nobody_do_not_matter(paged_batch):
    """NaN lies in every row that a token must not see, in the row of slot 0 as well."""
    step = paged_batch([(5, 5), (3, 3)], padding=2)
    q_nope, q_pe, w_uk, w_uv = operands(step)
    at = (step.slot_mapping, step.positions)
    cache = torch.full((step.num_blocks, step.block_size, R + DR), float("nan"))
    cache.view(-1, R + DR)[step.slot_mapping[:8]] = torch.randn(8, R + DR)
    whole = dsa.paged_prompt_attention(q_nope, q_pe, cache, *at, w_uk, w_uv, SCALE)
    assert whole[:8].isfinite().all()
    assert (whole[8:] == 0).all()
    alone = [each[5:8] for each in (q_nope, q_pe, *at)]
    second = dsa.paged_prompt_attention(*alone[:2], cache, *alone[2:], w_uk, w_uv, SCALE)
    torch.testing.assert_close(second, whole[5:8])


def test_a_layer_without_rotation_has_keys_of_the_latent_alone(paged_batch):
    step = paged_batch([(6, 6)])
    q_nope, q_pe, w_uk, w_uv = operands(step)
    cache = torch.randn(step.num_blocks, step.block_size, R)
    at = (step.slot_mapping, step.positions)
    got = dsa.paged_prompt_attention(q_nope, q_pe[..., :0], cache, *at, w_uk, w_uv, SCALE)
    rows = cache.view(-1, R)[step.slot_mapping]
    keys = torch.einsum("tr,hdr->htd", rows, w_uk)
    values = torch.einsum("tr,hdr->htd", rows, w_uv)
    expected = torch.nn.functional.scaled_dot_product_attention(
        q_nope.transpose(0, 1), keys, values, is_causal=True, scale=SCALE
    ).transpose(0, 1)
    torch.testing.assert_close(got, expected)


def test_results_round_once(paged_batch):
    step = paged_batch([(30, 30)])
    given = operands(step, torch.bfloat16)
    q_nope, q_pe, w_uk, w_uv = given
    cache = torch.randn(step.num_blocks, step.block_size, R + DR).bfloat16()
    at = (step.slot_mapping, step.positions)
    got = dsa.paged_prompt_attention(q_nope, q_pe, cache, *at, w_uk, w_uv, SCALE)
    wide = [each.float() for each in (q_nope, q_pe, cache)]
    exact = dsa.paged_prompt_attention(*wide, *at, w_uk.float(), w_uv.float(), SCALE)
    assert torch.equal(got, exact.bfloat16())


def test_long_prompts_are_attended_to_in_parts(paged_batch, monkeypatch):
    step = paged_batch([(40, 40), (25, 25)])
    q_nope, q_pe, w_uk, w_uv = operands(step)
    cache = torch.randn(step.num_blocks, step.block_size, R + DR)
    args = (q_nope, q_pe, cache, step.slot_mapping, step.positions, w_uk, w_uv, SCALE)
    whole = dsa.paged_prompt_attention(*args)
    monkeypatch.setattr("dsa_compile.ops.prompt_attention.GATHER_BYTES", 4 * H * 65 * 7)
    torch.testing.assert_close(dsa.paged_prompt_attention(*args), whole)
    torch.testing.assert_close(dsa.paged_prompt_attention(*args, slots_of(step)), whole)
