"""Candidates for a row's best scores: nothing of the best may be missing, whatever the order."""

import pytest
import torch

from dsa_compile.kernels.cuda.compiler import build
from dsa_compile.kernels.cuda.index_candidates import (
    CAPACITY,
    candidates_kernel,
    index_candidates,
)
from dsa_compile.kernels.cuda.index_logits import paged_index_logits
from tests.kernels.test_index_logits import e4m3, needs_gpu, sass_and_usage

BLOCK_SIZE = 64


@pytest.mark.parametrize("heads", [16, 32, 64])
def test_compiles_to_what_it_relies_on(heads, tmp_path):
    kernel = candidates_kernel(heads)
    cubin = build(kernel.source, arch="sm_90a", defines=kernel.defines)
    sass, usage = sass_and_usage(cubin, tmp_path / "kernel.cubin")
    assert "QGMMA" in sass
    assert "UTMALDG" in sass
    assert usage["LOCAL"] == usage["STACK"] == 0
    assert kernel.shared <= 227 * 1024


def scales_in(order: str, length: int) -> torch.Tensor:
    """Scales of keys that are all alike, so that they decide the order of the scores."""
    position = torch.arange(length, device="cuda")
    if order == "ascending":
        return 1 + position / length
    if order == "equal":
        return torch.ones(length, device="cuda")
    late = torch.where(position > length // 2, 100.0, 1.0)
    return late * (torch.rand(length, device="cuda") + 0.5)


@needs_gpu
@pytest.mark.parametrize("heads", [32, 64])
@pytest.mark.parametrize("order", ["random", "ascending", "late", "equal"])
@pytest.mark.parametrize(
    ("rows", "contexts", "topk"),
    [([300, 77], [9000, 3000], 2048), ([24], [50000], 2048), ([40, 3, 40], [50000, 0, 30], 512)],
    ids=str,
)
def test_the_best_are_among_the_candidates(rows, contexts, topk, order, heads):
    width = -(-max(contexts) // BLOCK_SIZE)
    count = len(rows) * width
    tables = torch.randperm(count, device="cuda").view(-1, width).int()
    if order == "random":
        keys, scales = e4m3(count, BLOCK_SIZE, 128), torch.rand(count, BLOCK_SIZE, device="cuda")
    else:
        keys = e4m3(1, 1, 128).expand(count, BLOCK_SIZE, 128).contiguous()
        scales = torch.empty(count, BLOCK_SIZE, device="cuda")
        for table in tables:
            scales[table.long()] = scales_in(order, width * BLOCK_SIZE).view(width, BLOCK_SIZE)
    parts = [keys.view(torch.uint8).flatten(1), scales.view(torch.uint8).flatten(1)]
    cache = torch.cat(parts, 1).view(count, BLOCK_SIZE, 132)
    total = sum(rows)
    q, weights = e4m3(total, heads, 128), torch.randn(total, heads, device="cuda")
    if order != "random":
        weights = weights.abs()
    row_starts = torch.tensor([0, *rows], device="cuda").cumsum(0).int()
    lengths = torch.tensor(contexts, dtype=torch.int32, device="cuda")
    arguments = (q, weights, cache, tables, row_starts, lengths)

    scores, ends, owners = paged_index_logits(*arguments)
    found, places, counts = index_candidates(*arguments, topk)
    assert int(counts.max()) <= CAPACITY
    for row in range(0, total, 7):
        seen, listed = int(ends[row]), int(counts[row])
        assert min(topk, seen) <= listed <= seen
        if not seen:
            continue
        best = scores[row, :seen].topk(min(topk, seen)).values
        assert torch.equal(found[row, :listed].topk(min(topk, seen)).values, best)
        # each once, and with the score of its key
        where = places[row, :listed].long()
        assert where.unique().numel() == listed
        score_at = torch.full((count * BLOCK_SIZE,), float("nan"), device="cuda")
        pages = tables[int(owners[row])].long()[:, None] * BLOCK_SIZE
        physical = (pages + torch.arange(BLOCK_SIZE, device="cuda")).flatten()[:seen]
        score_at[physical] = scores[row, :seen]
        assert torch.equal(score_at[where], found[row, :listed])
