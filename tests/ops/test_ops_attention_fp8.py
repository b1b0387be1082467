"""Latent attention over FP8 rows is that over the dequantised rows; the log-sum-exp puts parts
together."""

import pytest
import torch

from dsa_compile.ops.attention_fp8 import (
    paged_latent_attention_lse,
)

dsa = torch.ops.dsa
R, DR, H, ROWS = 256, 16, 3, 40


def fp8_cache(rows=ROWS):
    values = torch.randn(rows, R).to(torch.float8_e4m3fn)
    scales = torch.rand(rows, R // 128) + 0.1
    k_pe = torch.randn(rows, DR).bfloat16()
    parts = [part.view(torch.uint8) for part in (values, scales, k_pe)]
    return torch.cat(parts, 1).view(-1, 4, R + R // 32 + 2 * DR)


def inputs(tokens, width):
    q_latent, q_pe = torch.randn(tokens, H, R), torch.randn(tokens, H, DR)
    slots = torch.rand(tokens, ROWS).argsort(1)[:, :width].int()
    slots[torch.rand(slots.shape) < 0.3] = -1
    return q_latent, q_pe, slots


@pytest.mark.parametrize(("tokens", "width"), [(1, 1), (6, 9), (0, 5), (4, 0)])
def test_fp8_rows_are_dequantised(tokens, width):
    cache = fp8_cache()
    q_latent, q_pe, slots = inputs(tokens, width)
    flat = cache.view(ROWS, -1)
    values = flat[:, :R].view(torch.float8_e4m3fn).float()
    scales = flat[:, R : R + R // 32].contiguous().view(torch.float32)
    k_pe = flat[:, R + R // 32 :].contiguous().view(torch.bfloat16).float()
    rows = torch.cat((values * scales.repeat_interleave(128, 1), k_pe), 1)
    expected = dsa.paged_latent_attention(q_latent, q_pe, rows[None], slots, 0.2)
    got = dsa.paged_latent_attention_fp8(q_latent, q_pe, cache, slots, 0.2)
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("as_bytes", [True, False])
def test_rows_under_one_scale_are_dequantised(as_bytes):
    cache = torch.randn(10, 4, R + DR).to(torch.float8_e4m3fn)
    q_latent, q_pe, slots = inputs(5, 12)
    scale = torch.tensor([0.7])
    expected = dsa.paged_latent_attention(q_latent, q_pe, cache.float() * scale, slots, 0.2)
    if as_bytes:
        cache = cache.view(torch.uint8)
    got = dsa.paged_latent_attention_fp8_tensor(q_latent, q_pe, cache, slots, 0.2, scale)
    torch.testing.assert_close(got, expected)


def test_parts_are_put_together_by_their_log_sum_exp():
    cache = fp8_cache()
    q_latent, q_pe, slots = inputs(6, 32)
    slots[3] = -1
    slots[4, :16] = -1
    whole, lse = paged_latent_attention_lse(q_latent, q_pe, cache, slots, 0.2)
    parts = [
        paged_latent_attention_lse(q_latent, q_pe, cache, half.contiguous(), 0.2)
        for half in slots.chunk(2, 1)
    ]
    joined = torch.logaddexp(parts[0][1], parts[1][1])
    torch.testing.assert_close(joined, lse)
    assert lse[3].isneginf().all()
    assert lse.isneginf().sum() == H
    merged = sum(
        out * (part_lse - joined).exp().nan_to_num(0.0).unsqueeze(2) for out, part_lse in parts
    )
    torch.testing.assert_close(merged, whole)


def test_the_log_sum_exp_is_natural_and_of_scaled_scores():
    q_latent, q_pe, slots = inputs(2, 5)
    slots = torch.tensor([[3, 1, -1, -1, 7], [2, 2, 2, -1, -1]], dtype=torch.int32)
    rows = torch.randn(1, 8, R + DR)
    _, lse = paged_latent_attention_lse(q_latent, q_pe, rows, slots, 0.2)
    query = torch.cat((q_latent, q_pe), -1).double()
    keys = rows[0].double()
    first = (query[0] @ keys[[3, 1, 7]].T * 0.2).exp().sum(-1).log()
    second = (query[1] @ keys[[2, 2, 2]].T * 0.2).exp().sum(-1).log()
    torch.testing.assert_close(lse.double(), torch.stack((first, second)), rtol=1e-5, atol=1e-5)


def test_a_nan_row_stays_with_the_tokens_that_chose_it():
    cache = fp8_cache(8)
    cache.view(-1, cache.shape[2])[0, :R] = 0x7F  # e4m3's NaN
    q_latent, q_pe, _ = inputs(2, 4)
    slots = torch.tensor([[1, 2, -1, -1], [0, 3, -1, -1]], dtype=torch.int32)
    got = dsa.paged_latent_attention_fp8(q_latent, q_pe, cache, slots, 0.2)
    assert got[0].isfinite().all()
    assert got[1].isnan().all()


def test_caches_of_another_format_are_refused():
    q_latent, q_pe, slots = inputs(2, 4)
    with pytest.raises(ValueError, match=r"takes cache as uint8.* with R = 256"):
        dsa.paged_latent_attention_fp8(q_latent, q_pe, torch.randn(4, 4, R + DR), slots, 0.2)
    with pytest.raises(ValueError, match=r"dr = 8 as in q_pe, not uint8\[.*296\]"):
        dsa.paged_latent_attention_fp8(q_latent, q_pe[..., :8], fp8_cache(), slots, 0.2)
    with pytest.raises(ValueError, match="takes cache as float8_e4m3fn or uint8"):
        dsa.paged_latent_attention_fp8_tensor(
            q_latent, q_pe, torch.randn(4, 4, R + DR), slots, 0.2, torch.ones(1)
        )
