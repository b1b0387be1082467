"""Run by test_mla_prefill.py in a process of its own: Triton kernels under its interpreter.

Prints one line a case: its name and the relative error against the reference op.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

import torch

from dsa_compile.kernels.triton import latent_rows, mla, mla_fp8, row_sets
from dsa_compile.ops import attention_fp8 as attention_fp8_reference
from dsa_compile.ops import latent_rows as rows_reference
from dsa_compile.ops.attention import paged_latent_attention
from tests.kernels.interpreter import round_as_hardware

SCALE = 0.13


def error(got, expected):
    assert not got.isnan().any()
    return ((got.float() - expected.float()).norm() / expected.float().norm()).item()


def attention(heads, splits, block_size, dtype):
    tokens, latent, rope, count, blocks = 4, 64, 16, 200, 12
    q = torch.randn(tokens, heads, latent + 8, dtype=dtype)[..., :latent]  # rows lie apart
    pe = torch.randn(tokens, heads, rope, dtype=dtype)
    cache = torch.randn(blocks, block_size, latent + rope, dtype=dtype)
    slots = torch.randint(1, blocks * block_size, (tokens, count), dtype=torch.int32)
    slots[0, 70:] = -1  # the dense form: a prefix
    slots[1] = -1
    slots[2, ::3] = -1
    cache.view(-1, latent + rope)[0] = float("nan")  # a row that nobody names
    got, lse = mla.attend(q, pe, cache, slots, SCALE, splits=splits)
    assert (got[1] == 0).all()
    assert (lse[1] == float("-inf")).all()
    rows = cache.view(-1, latent + rope)[slots[3].long()].float()
    logits = torch.cat((q, pe), -1)[3].float() @ rows.T * SCALE
    torch.testing.assert_close(lse[3], logits.logsumexp(-1), rtol=1e-3, atol=1e-3)
    return error(got, paged_latent_attention(q, pe, cache, slots, SCALE))


def attention_fp8(tokens, count, one_scale):
    q = torch.randn(tokens, 5, 256).bfloat16()
    pe = torch.randn(tokens, 5, 16).bfloat16()
    slots = torch.randint(-2, 256, (tokens, count)).clamp(min=-1).int()
    if one_scale:
        cache, scale = torch.randn(4, 64, 272).to(torch.float8_e4m3fn), torch.tensor([0.4])
        got, lse = mla_fp8.attend_fp8(q, pe, cache, slots, SCALE, scale)
        wide = attention_fp8_reference.paged_latent_attention_lse
        expected, expected_lse = wide(q, pe, cache, slots, SCALE, scale)
    else:
        cache = fp8_cache(4, 64)
        got, lse = mla_fp8.attend_fp8(q, pe, cache, slots, SCALE)
        wide = attention_fp8_reference.paged_latent_attention_lse
        expected, expected_lse = wide(q, pe, cache, slots, SCALE)
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=1e-2)
    return error(got, expected) if tokens else 0.0


def named_rows(tokens, count, cache_rows):
    """Each row once, and where each slot finds its own; slots beyond the cache name none."""
    slots = torch.randint(-3, cache_rows + 3, (tokens, count), dtype=torch.int32)
    slots[0] = cache_rows - 1
    found = row_sets.distinct_rows(slots, cache_rows)
    named = (slots >= 0) & (slots < cache_rows)
    rows = found.rows[: int(found.count)]
    assert rows.sort().values.tolist() == slots[named].unique().tolist()
    assert torch.equal(rows[found.places[named].long()], slots[named])
    assert (found.places[~named] == -1).all()


def fp8_cache(blocks, block_size):
    values = torch.randn(blocks, block_size, 256).to(torch.float8_e4m3fn)
    scales = torch.rand(blocks, block_size, 2)
    rope = torch.randn(blocks, block_size, 16).bfloat16()
    return torch.cat([part.view(torch.uint8) for part in (values, scales, rope)], -1)


def main():
    torch.manual_seed(0)
    round_as_hardware()
    mla.capability = lambda device: 90
    mla.multiprocessors = lambda device: 8
    for case in (
        (5, 1, 16, torch.float32),
        (16, 4, 32, torch.float32),
        (24, 1, 64, torch.float32),
        (40, 2, 64, torch.float32),
        (16, 1, 16, torch.bfloat16),
        (64, 4, 64, torch.bfloat16),
    ):
        print("attention", *case, attention(*case))
    for case in ((2, 30, False), (4, 200, False), (2, 30, True), (4, 200, True)):
        print("attention over bfloat16 of FP8", *case, attention_fp8(*case))
    mla_fp8._FEW_SLOTS = 100  # of many slots, the rows that they name
    for case in ((4, 200, False), (4, 200, True), (0, 200, False)):
        print("attention over bfloat16 of named rows", *case, attention_fp8(*case))
    mla_fp8.MOST_ROWS = 150  # less than the cache has: three tokens at a time
    print("attention over bfloat16 in parts", attention_fp8(7, 50, False))
    for case in ((3, 40, 16), (5, 300, 70), (9, 1000, 5000)):
        named_rows(*case)
    picked = torch.tensor([3, -1, 40, 40, 0, 63, 7, 8, 9, 10, -1], dtype=torch.int32)
    cache = fp8_cache(4, 16)
    expected = rows_reference.latent_rows_fp8(cache, picked, 256).bfloat16()
    assert torch.equal(latent_rows.latent_rows_fp8(cache, picked, 256), expected)
    scale, values = torch.tensor([0.3]), cache[..., :256].contiguous()
    expected = rows_reference.latent_rows_fp8_tensor(values, picked, scale).bfloat16()
    assert torch.equal(latent_rows.latent_rows_fp8_tensor(values, picked, scale), expected)
    print("rows 0.0")


main()
