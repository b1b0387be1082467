"""Run by test_prompt_attention.py in a process of its own: Triton kernels under its interpreter.

Prints one line a case: its name and the relative error against the reference op.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

import torch

from dsa_compile.kernels.triton import prompt_attention, selected_tokens
from dsa_compile.kernels.triton.prompt_attention import PromptTile
from dsa_compile.ops import prompt_attention as reference
from tests.kernels.interpreter import round_as_hardware

SCALE, BLOCKS, BLOCK = 0.13, 40, 16


def error(got, expected):
    assert not got.isnan().any()
    return ((got.float() - expected.float()).norm() / expected.float().norm()).item()


def step(lengths, padding):
    """Slots and positions of prompts whose rows lie apart, and of padding."""
    tokens = sum(lengths)
    slots = torch.randperm(BLOCKS * BLOCK - 1)[:tokens] + 1
    positions = [torch.arange(length) for length in lengths]
    pad = torch.nn.functional.pad
    return pad(slots, (0, padding), value=-1), pad(torch.cat(positions), (0, padding))


def operands(tokens, heads, sizes, latent, dtype):
    nope, rope, values = sizes
    q = torch.randn(tokens, heads, nope + 8, dtype=dtype)[..., :nope]  # rows lie apart
    pe = torch.randn(tokens, heads, rope, dtype=dtype)
    w_uk, w_uv = (torch.randn(heads, n, latent, dtype=dtype) / 8 for n in (nope, values))
    return q, pe, w_uk, w_uv


def choice(slots, positions, most):
    """Slots that tokens select, of whatever token, and others, of nobody or of no row."""
    shape = len(slots), most
    picked = slots[torch.randint(len(slots), shape)].int()
    strangers = torch.randint(-2, BLOCKS * BLOCK + 9, shape).int()
    chosen = torch.where(torch.rand(shape) < 0.8, picked, strangers)
    chosen[3::5] = -1  # tokens that select nothing
    return chosen


def plain(lengths, padding, heads, sizes, tile, dtype, most=None):
    slots, positions = step(lengths, padding)
    latent = 32
    q, pe, w_uk, w_uv = operands(len(slots), heads, sizes, latent, dtype)
    cache = torch.randn(BLOCKS, BLOCK, latent + sizes[1], dtype=dtype)
    cache.view(-1, cache.shape[2])[0] = float("nan")  # a row that nobody names
    prompt_attention.choose_prompt_tile = lambda *given: tile
    args = (q, pe, cache, slots, positions, w_uk, w_uv, SCALE)
    if most is not None:
        args += (choice(slots, positions, most),)
    got = prompt_attention.paged_prompt_attention(*args)
    assert (got[len(slots) - padding :] == 0).all()
    return error(got, reference.paged_prompt_attention(*args))


def quantized(one_scale):
    slots, positions = step([9, 30], 2)
    q, pe, w_uk, w_uv = operands(41, 3, (32, 16, 32), 256, torch.bfloat16)
    values = torch.randn(BLOCKS, BLOCK, 272).to(torch.float8_e4m3fn)
    prompt_attention.choose_prompt_tile = lambda *given: PromptTile(32, 16, 4, 1)
    if one_scale:
        scale = torch.tensor([0.4])
        args = (q, pe, values, slots, positions, w_uk, w_uv, SCALE, scale)
        args += (choice(slots, positions, 20),)
        got = prompt_attention.paged_prompt_attention_fp8_tensor(*args)
        return error(got, reference.paged_prompt_attention_fp8_tensor(*args))
    scales = torch.rand(BLOCKS, BLOCK, 2)
    rope = torch.randn(BLOCKS, BLOCK, 16).bfloat16()
    parts = (values[..., :256].contiguous(), scales, rope)
    cache = torch.cat([part.view(torch.uint8) for part in parts], -1)
    args = (q, pe, cache, slots, positions, w_uk, w_uv, SCALE, choice(slots, positions, 20))
    got = prompt_attention.paged_prompt_attention_fp8(*args)
    return error(got, reference.paged_prompt_attention_fp8(*args))


def with_nan(dtype, selects):
    """The error of all tokens but those that attend to a row with a NaN, which are NaN."""
    slots, positions = step([9, 30, 20], 3)
    q, pe, w_uk, w_uv = operands(len(slots), 2, (32, 16, 64), 32, dtype)
    cache = torch.randn(BLOCKS, BLOCK, 48, dtype=dtype)
    cache.view(-1, 48)[slots[20], 3] = float("nan")
    prompt_attention.choose_prompt_tile = lambda *given: PromptTile(64, 64, 4, 1)
    args = (q, pe, cache, slots, positions, w_uk, w_uv, SCALE)
    if selects:
        args += (slots[torch.where(torch.arange(62) < 39, 20, 45)][:, None].int(),)
    got = prompt_attention.paged_prompt_attention(*args)
    want = reference.paged_prompt_attention(*args)
    assert got[20:39].isnan().all()
    assert torch.equal(got.isnan(), want.isnan())
    return error(got.nan_to_num(), want.nan_to_num())


def main():
    torch.manual_seed(0)
    round_as_hardware()
    narrow, wide = PromptTile(32, 16, 4, 1), PromptTile(64, 64, 4, 1)
    tiles = PromptTile(32, 16, 4, 1, tiles=True)
    even, odd = (32, 16, 64), (48, 16, 80)
    for case in (
        ([1], 0, 2, even, narrow, torch.float32),
        ([100], 0, 3, even, narrow, torch.float32),
        ([100], 3, 2, odd, wide, torch.float32),
        ([17, 1, 40, 2, 64, 9], 5, 2, odd, narrow, torch.float32),
        ([5, 90, 3], 0, 2, even, wide, torch.float32),
        ([33], 64, 2, (24, 0, 24), narrow, torch.float32),
        ([64, 64], 0, 16, even, tiles, torch.float32),
        ([70, 20], 7, 2, even, tiles, torch.bfloat16),
        ([70, 20], 7, 2, even, wide, torch.bfloat16),
        ([1], 0, 2, even, narrow, torch.float32, 1),
        ([100], 0, 3, even, narrow, torch.float32, 40),
        ([17, 1, 40, 2, 64, 9], 5, 2, odd, wide, torch.float32, 70),
        ([64, 64], 0, 16, even, tiles, torch.float32, 9),
        ([70, 20], 7, 2, even, wide, torch.bfloat16, 30),
        ([200], 3, 1, even, narrow, torch.float32, 60),
    ):
        selected_tokens._BYTES = 64 * 1024 if len(case[0]) > 1 else 2000  # in parts
        name = str(case).replace("torch.", "")
        print("attention", name, plain(*case))
    for dtype in (torch.float32, torch.bfloat16):
        for selects in (False, True):
            print("attention beside a NaN", dtype, selects, with_nan(dtype, selects))
    for one_scale in (False, True):
        print("attention to bfloat16 of FP8", one_scale, quantized(one_scale))


main()
