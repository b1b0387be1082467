"""Run by test_index_scores.py in a process of its own: the kernel under Triton's interpreter.

Prints one line a case: its name and the largest error against scores in fp64.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

import torch

from dsa_compile.kernels.triton import index_scores
from tests.kernels.index_scores_samples import batch
from tests.kernels.interpreter import round_as_hardware

SCALE = 0.3


def check(name, counts, contexts, block_size, heads, dim, dtype, rows=None):
    tables, bounds, lengths, pages = batch(counts, contexts, block_size)
    tokens = int(bounds[-1]) + 2
    q = torch.randn(tokens, heads, dim).to(dtype)
    weights = torch.randn(tokens, heads)
    keys = torch.randn(pages, block_size, dim).to(dtype)
    scales = torch.rand(pages, block_size) + 0.5
    if dtype == torch.float8_e4m3fn:
        parts = (keys.view(torch.uint8).flatten(1), scales.view(torch.uint8).flatten(1))
        cache = torch.cat(parts, 1).view(pages, block_size, dim + 4)
    else:
        cache = keys
    rows = rows or (0, tokens)
    scores, ends, owners = index_scores.paged_index_scores(
        q, weights, cache, tables, bounds, lengths, SCALE, rows
    )
    worst = 0.0
    for row, token in enumerate(range(*rows)):
        r = next((r for r in range(len(counts)) if bounds[r] <= token < bounds[r + 1]), None)
        visible = 0 if r is None else max(contexts[r] - int(bounds[r + 1]) + token + 1, 0)
        assert ends[row] == visible, (name, token, ends[row], visible)
        if not visible:
            continue
        assert owners[row] == r
        place = torch.arange(visible)
        page, offset = tables[r, place // block_size].long(), place % block_size
        logits = q[token].double() @ keys[page, offset].double().T
        if dtype == torch.float8_e4m3fn:
            expected = weights[token].double() @ logits.relu() * scales[page, offset]
        else:
            expected = weights[token].double() @ (SCALE * logits).relu()
        error = (scores[row, :visible] - expected).abs().max() / expected.abs().max()
        worst = max(worst, error.item())
    print(name, worst)


def spoiled(dtype):
    """A key of NaN scores NaN, and nothing else does; a NaN behind the context is not looked at."""
    tables, bounds, lengths, pages = batch([2], [20], 16)
    keys = torch.randn(pages, 16, 32).to(dtype)
    keys[tables[0, 0], 7] = float("nan")
    keys[tables[0, 1], 5:] = float("nan")
    q, weights = torch.randn(4, 8, 32).to(dtype), torch.randn(4, 8)
    scores, _, _ = index_scores.paged_index_scores(
        q, weights, keys, tables, bounds, lengths, SCALE, (0, 4)
    )
    for row, visible in enumerate((19, 20)):
        assert scores[row, :visible].isnan().nonzero().flatten().tolist() == [7]


def main():
    torch.manual_seed(0)
    round_as_hardware()
    e4m3 = torch.float8_e4m3fn
    check("decode bf16", [1, 1, 1], [5, 130, 0], 16, 64, 128, torch.bfloat16)
    check("ragged fp32", [3, 0, 70], [3, 9, 200], 32, 8, 32, torch.float32)
    check("ragged e4m3", [3, 1, 20], [140, 9, 20], 64, 64, 128, e4m3)
    check("some rows e4m3", [40], [170], 16, 16, 128, e4m3, rows=(7, 33))
    spoiled(torch.bfloat16)
    spoiled(torch.float32)
    check("no request", [], [], 16, 16, 128, e4m3)


if __name__ == "__main__":
    main()
