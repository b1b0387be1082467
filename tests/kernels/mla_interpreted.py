"""Run by test_mla_prefill.py in a process of its own: Triton kernels under its interpreter.

Prints one line a case: its name and the relative error against the reference op.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

import torch

from dsa_compile.kernels.triton import latent_rows, mla
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


def main():
    torch.manual_seed(0)
    round_as_hardware()
    mla._capability = lambda device: 90
    for case in (
        (5, 1, 16, torch.float32),
        (16, 4, 32, torch.float32),
        (24, 1, 64, torch.float32),
        (40, 2, 64, torch.float32),
        (16, 1, 16, torch.bfloat16),
        (64, 4, 64, torch.bfloat16),
    ):
        print("attention", *case, attention(*case))
    picked = torch.tensor([3, -1, 40, 40, 0, 63, 7, 8, 9, 10, -1], dtype=torch.int32)
    fp8 = torch.randn(4, 16, 256).clamp(-2, 2).to(torch.float8_e4m3fn).view(torch.uint8)
    scales = torch.rand(4, 16, 2).view(torch.uint8)
    rope = torch.randn(4, 16, 16, dtype=torch.bfloat16).view(torch.uint8)
    cache = torch.cat((fp8, scales, rope), -1)
    expected = rows_reference.latent_rows_fp8(cache, picked, 256)
    assert torch.equal(latent_rows.latent_rows_fp8(cache, picked, 256), expected)
    scale = torch.tensor([0.3])
    expected = rows_reference.latent_rows_fp8_tensor(fp8, picked, scale)
    assert torch.equal(latent_rows.latent_rows_fp8_tensor(fp8, picked, scale), expected)
    print("rows 0.0")


main()
