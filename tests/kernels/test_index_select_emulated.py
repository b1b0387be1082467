"""The selection from lists of candidates on the CPU, a thread for a thread."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("cuda.bindings")

from dsa_compile.kernels.cuda.index_candidates import QUERIES, select_kernel
from dsa_compile.kernels.cuda.launch import Int64
from tests.kernels import emulator
from tests.kernels.test_topk import expected, in_order

pytestmark = pytest.mark.skipif(not emulator.available(), reason="needs g++")

K, PAGE, CAPACITY, THREADS = 128, 16, 32, 256
POISON = -(2**31) + 12345
INFINITY, NAN = float("inf"), float("nan")


@pytest.fixture(autouse=True)
def emulated(monkeypatch, tmp_path):
    header = tmp_path / "common.h"
    extra = Path(__file__).parent / "topk_emulator.h"
    header.write_text(emulator.HEADER.read_text() + extra.read_text())

    def portable(text: str) -> str:
        if text.startswith("// Single instructions"):
            return "#pragma once\n"
        return text.replace(
            "extern __shared__ uint4 memory[];", "uint4* const memory = my_block().memory;"
        )

    monkeypatch.setattr(emulator, "HEADER", header)
    monkeypatch.setattr(emulator, "_portable", portable)
    torch.manual_seed(0)


def select(scores, ends, thresholds, cuts):
    """Lists of what reaches the thresholds, the columns divided at ``cuts`` among blocks.

    Returns the selected columns and whether each row failed. ``cuts[r]`` are the first block of
    row r and the columns at which the next ones take over, multiples of 64.
    """
    rows, width = scores.shape
    blocks = 4
    sets = rows + QUERIES * blocks
    entries = torch.full((sets, 4, CAPACITY, 16, 2), POISON, dtype=torch.int32)
    counts = torch.full((sets, 64), 255, dtype=torch.uint8)
    parts = torch.full((rows, 2), POISON, dtype=torch.int32)
    for r, (first, *inner) in enumerate(cuts):
        edges = [0, *inner, int(ends[r])]
        parts[r] = torch.tensor([first, first + len(inner)])
        for part in range(len(edges) - 1):
            number, lengths = r + QUERIES * (first + part), [0] * 64
            for column in range(edges[part], edges[part + 1]):
                score, at = scores[r, column], column % 64
                if not bool(score < thresholds[r]) and lengths[at] < CAPACITY:
                    entry = entries[number, at // 16, lengths[at], at % 16]
                    entry[0], entry[1] = score.view(torch.int32), column
                    lengths[at] += 1
            counts[number] = torch.tensor(lengths)
    pages = -(-width // PAGE)
    tables = torch.randperm(2 * pages, dtype=torch.int32).view(2, pages)
    owners = torch.arange(rows, dtype=torch.int32) % 2
    out = torch.full((rows, K), POISON, dtype=torch.int32)
    failed_rows = torch.full((rows,), POISON, dtype=torch.int32)
    failed = torch.zeros(1, dtype=torch.int32)
    emulator.launch(
        select_kernel(CAPACITY),
        (rows, 1, 1),
        THREADS,
        entries,
        counts,
        parts,
        ends,
        tables,
        Int64(pages),
        owners,
        PAGE.bit_length() - 1,
        out,
        K,
        failed_rows,
        failed,
    )
    assert bool(failed) == bool(failed_rows.any())
    where = torch.full((2, 2 * pages), POISON, dtype=torch.int32)
    for r in range(2):
        where[r, tables[r].long()] = torch.arange(pages, dtype=torch.int32)
    columns = out.clone()
    found = out >= 0
    pages_of = where[owners[:, None].expand_as(out)[found].long(), out[found].long() // PAGE]
    columns[found] = pages_of * PAGE + out[found] % PAGE
    return columns, failed_rows.bool()


@pytest.mark.slow
def test_selects_the_best_of_all_parts():
    width = 1900
    rows = [
        (torch.randn(width), 0.9, [0]),
        (torch.randn(width), 1.0, [1, 640]),
        (torch.randn(width), -0.3, [0, 64, 1024]),
        (torch.randint(0, 5, (width,)).float(), 3.0, [2]),  # ties at the cut
        (torch.zeros(width), 0.0, [1]),  # nothing but ties
        (torch.where(torch.rand(width) < 0.01, NAN, torch.randn(width)), 0.5, [0, 128]),
        (torch.where(torch.rand(width) < 0.1, INFINITY, -torch.rand(width)), 1.0, [3]),
        (torch.randn(width), INFINITY, [0]),  # sees too few keys to need scores
        (torch.randn(width), INFINITY, [0]),
    ]
    scores = torch.stack([row[0] for row in rows])
    ends = torch.tensor([width] * 7 + [100, 0], dtype=torch.int32)
    got, failed = select(scores, ends, [row[1] for row in rows], [row[2] for row in rows])
    assert not failed.any()
    assert torch.equal(in_order(got), expected(scores, torch.zeros_like(ends), ends, K))


def test_says_when_the_lists_cannot_tell():
    """Too few candidates, one full list, more than the block holds."""
    width = 3000
    crowded = torch.where(torch.arange(width) % 64 == 5, 1.0, -torch.rand(width))
    crowded[:100] = 1.0
    scores = torch.stack([torch.randn(width), crowded, torch.randn(width), torch.randn(width)])
    ends = torch.full((4,), width, dtype=torch.int32)
    got, failed = select(scores, ends, [3.0, 0.5, -INFINITY, 1.0], [[0], [1], [0, 1024, 2048], [2]])
    assert failed.tolist() == [True, True, True, False]
    assert (got[:3] == POISON).all()
    assert torch.equal(in_order(got)[3], expected(scores, torch.zeros_like(ends), ends, K)[3])
