"""Indexer scores: what the compiler made of the kernels, and on a GPU, what they compute."""

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from dsa_compile.kernels.cuda import index_topk
from dsa_compile.kernels.cuda.compiler import build
from dsa_compile.kernels.cuda.index_logits import (
    FEW,
    paged_index_logits,
    paged_kernel,
    warpgroups_for,
)

triton = pytest.importorskip("triton")
E4M3 = torch.float8_e4m3fn
needs_gpu = pytest.mark.gpu

KERNELS = [
    (64, 1),
    (64, 1, FEW),
    (64, 2),
    (64, 4),
    (64, 8),
    (32, 8),
    (16, 8),
]


def sass_and_usage(cubin: bytes, path: Path) -> tuple[str, dict[str, int]]:
    path.write_bytes(cubin)
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"

    def dump(option: str) -> str:
        return subprocess.run([tool, option, path], capture_output=True, text=True).stdout

    usage = re.findall(r"(REG|STACK|LOCAL):(\d+)", dump("--dump-resource-usage"))
    return dump("-sass"), {key: int(value) for key, value in usage}


@pytest.mark.slow
@pytest.mark.parametrize("kernel", KERNELS, ids=str)
def test_compiles_to_what_it_relies_on(kernel, tmp_path):
    heads, queries, *ring = kernel
    compiled = paged_kernel(*kernel)
    cubin = build(compiled.source, arch="sm_90a", defines=compiled.defines)
    sass, usage = sass_and_usage(cubin, tmp_path / "kernel.cubin")
    groups = warpgroups_for(heads, queries)
    columns = heads * queries // (groups.math if queries == 8 else 1)
    products = re.findall(r"QGMMA\.64x(\d+)x32\.F32\.E4M3\.E4M3", sass)
    assert set(products) == {str(columns)}
    assert "UTMALDG" in sass
    assert "UBLKCP" in sass
    ahead, wait, _ = sass.partition("ACQBULK")
    assert wait
    assert ("UBLKPF" in ahead) == (ring == [FEW]), "keys are asked for ahead of the wait"
    assert usage["LOCAL"] == usage["STACK"] == 0
    assert usage["REG"] * groups.threads * groups.blocks <= 65536
    assert (compiled.shared + 1024) * groups.blocks <= 228 * 1024


# ---- on a GPU --------------------------------------------------------------------------------


@dataclass
class Pages:
    cache: torch.Tensor
    keys: torch.Tensor
    scales: torch.Tensor


def e4m3(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").to(E4M3)


def pages(blocks: int, block_size: int) -> Pages:
    keys = e4m3(blocks, block_size, 128)
    scales = torch.rand(blocks, block_size, device="cuda") + 0.5
    parts = [keys.view(torch.uint8).flatten(1), scales.view(torch.uint8).flatten(1)]
    return Pages(torch.cat(parts, 1).view(blocks, block_size, 132), keys, scales)


def scores(q, weights, keys, scales):
    """Scores of each row for each key, and the sums of the magnitudes added up for them."""
    q, keys, weights, scales = (x.double() for x in (q, keys, weights, scales))
    dots = torch.einsum("thd,nd->thn", q, keys).relu()
    sizes = torch.einsum("thd,nd->thn", q.abs(), keys.abs())
    return (
        torch.einsum("thn,th->tn", dots, weights) * scales,
        torch.einsum("thn,th->tn", sizes, weights.abs()) * scales,
    )


def close(got, expected, magnitude):
    """The tensor cores keep some 14 bits of a sum of e4m3 products, whatever cancels afterwards.

    They cut rather than round, by up to 2^-13 of the largest product for each of 32 that are added
    at a time. A head left out of 64 is more than a hundred times what is allowed here.
    """
    assert not got.isnan().any()
    excess = ((got - expected).abs() / (magnitude + 1e-2)).max()
    assert excess <= 1e-4, float(excess)


@needs_gpu
@pytest.mark.parametrize(
    ("rows", "contexts", "heads", "block_size", "window"),
    [
        ([1, 1, 1, 1, 1], [1000, 5, 64, 0, 2000], 64, 64, None),
        ([1] * 200, [70 * i % 513 for i in range(200)], 64, 64, None),
        ([2, 2, 2, 1, 2], [1000, 5, 64, 1, 2000], 64, 64, None),
        ([4, 3, 1, 0, 4], [100, 5, 640, 1, 3000], 64, 32, None),
        ([40, 3, 1, 0, 17], [100, 50, 640, 1, 3000], 64, 16, None),
        ([40, 3, 1, 0, 17], [100, 50, 640, 1, 3000], 64, 128, (5, 50)),
        ([40, 70, 1, 0, 177], [300, 50, 640, 1, 3000], 32, 64, (50, 260)),
        ([1, 1], [300, 50], 16, 8, None),
        ([1, 2] * 20, [300, 50] * 20, 32, 4, None),
        ([1, 1], [0, 0], 64, 64, None),
    ],
    ids=lambda value: str(value)[:40],
)
def test_paged_scores(rows, contexts, heads, block_size, window):
    requests = len(rows)
    width = max(-(-n // block_size) for n in contexts) + 1
    held = pages(requests * width + 3, block_size)
    tables = torch.randperm(requests * width + 3, device="cuda")[: requests * width]
    tables = tables.view(requests, width).int()
    for r, n in enumerate(contexts):
        tables[r, -(-n // block_size) :] = -1
    row_starts = torch.tensor([0, *rows]).cumsum(0)
    total = int(row_starts[-1]) + 3  # the last three are padding
    q, weights = e4m3(total, heads, 128), torch.randn(total, heads, device="cuda")
    first, last = window or (0, total)
    out = torch.full((last - first, width * block_size), float("nan"), device="cuda")
    got, ends, owners = paged_index_logits(
        q,
        weights,
        held.cache,
        tables,
        row_starts.int().cuda(),
        torch.tensor(contexts, dtype=torch.int32, device="cuda"),
        (first, last),
        out,
    )
    for row in range(first, last):
        owner = int((row_starts[1:] <= row).sum())
        seen = 0
        if owner < requests:
            seen = max(0, contexts[owner] - (int(row_starts[owner + 1]) - 1 - row))
        assert int(ends[row - first]) == seen
        assert got[row - first, seen:].isnan().all()
        if seen:
            assert int(owners[row - first]) == owner
            listed = tables[owner, : -(-seen // block_size)].long()
            keys, scales = held.keys[listed].flatten(0, 1), held.scales[listed].flatten()
            one = slice(row, row + 1)
            expected = scores(q[one], weights[one], keys[:seen], scales[:seen])
            close(got[row - first, :seen], *(part[0] for part in expected))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(2, 64, 64).to(E4M3)}, "e4m3"),
        ({"q": torch.zeros(2, 48, 128).to(E4M3)}, "heads"),
        ({"weights": torch.zeros(2, 64).half()}, "weights"),
        ({"cache": torch.zeros(3, 64, 128, dtype=torch.uint8)}, "cache"),
        ({"cache": torch.zeros(3, 48, 132, dtype=torch.uint8)}, "block sizes"),
        ({"block_tables": torch.zeros(1, 2)}, "block_tables"),
        ({"rows": (1, 5)}, "rows within 2"),
        ({"out": torch.zeros(2, 100)}, "out as float32"),
    ],
)
def test_wrong_operands_are_refused(change, message):
    arguments = {
        "q": torch.zeros(2, 64, 128).to(E4M3),
        "weights": torch.zeros(2, 64),
        "cache": torch.zeros(3, 64, 132, dtype=torch.uint8),
        "block_tables": torch.zeros(1, 2, dtype=torch.int32),
        "cu_seqlens": torch.zeros(2, dtype=torch.int32),
        "context_lens": torch.zeros(1, dtype=torch.int32),
    }
    with pytest.raises(ValueError, match=message):
        paged_index_logits(**(arguments | change))


@needs_gpu
@pytest.mark.parametrize(
    ("rows", "contexts", "score_bytes"),
    [
        ([1] * 5, [3000, 5, 64, 0, 9000], 512 << 20),
        ([2, 2, 1], [3000, 2600, 64], 512 << 20),
        ([300, 1, 70], [3000, 2500, 9000], 512 << 20),
        ([300, 1, 70], [3000, 2500, 9000], 1 << 20),  # several passes
    ],
    ids=str,
)
def test_selection_is_the_references_up_to_the_rounding_of_scores(
    rows, contexts, score_bytes, monkeypatch
):
    monkeypatch.setattr(index_topk, "SCORE_BYTES", score_bytes)
    topk, block_size = 2048, 64
    requests, total = len(rows), sum(rows) + 2
    width = max(-(-n // block_size) for n in contexts) + 1
    held = pages(requests * width, block_size)
    tables = torch.randperm(requests * width, device="cuda").view(requests, width).int()
    row_starts = torch.tensor([0, *rows]).cumsum(0)
    q, weights = e4m3(total, 64, 128), torch.randn(total, 64, device="cuda")
    lengths = torch.tensor(contexts, dtype=torch.int32, device="cuda")
    got = index_topk.paged_index_topk_fp8(
        q, weights, held.cache, tables, row_starts.int().cuda(), lengths, topk
    )
    assert (got[-2:] == -1).all()
    for row in {0, 1, rows[0] - 1, rows[0], sum(rows) - 1}:
        owner = int((row_starts[1:] <= row).sum())
        seen = max(0, contexts[owner] - (int(row_starts[owner + 1]) - 1 - row))
        chosen = got[row][got[row] >= 0].long()
        count = min(topk, seen)
        assert chosen.unique().numel() == chosen.numel() == count
        if not seen:
            continue
        places = (tables[owner].long()[:, None] * block_size).add(
            torch.arange(block_size, device="cuda")
        )
        places = places.flatten()[:seen]
        assert torch.isin(chosen, places).all()
        one = slice(row, row + 1)
        keys, scales = held.keys.flatten(0, 1), held.scales.flatten()
        score = scores(q[one], weights[one], keys[places], scales[places])[0][0]
        best = score.topk(count).values
        mine = scores(q[one], weights[one], keys[chosen], scales[chosen])[0][0]
        mine = mine.sort(descending=True).values
        assert (best - mine).max() <= 4e-3 * score.abs().max()
