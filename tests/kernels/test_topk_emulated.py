"""The top-k kernels on the CPU, a thread for a thread, in their smallest forms."""

import math
from pathlib import Path

import pytest
import torch

pytest.importorskip("cuda.bindings")

from dsa_compile.kernels.cuda import topk as module
from dsa_compile.kernels.cuda.launch import CudaKernel
from dsa_compile.kernels.cuda.topk import Filter, Rows, topk
from tests.kernels import emulator
from tests.kernels.test_topk import expected, in_order
from tests.quick_cases import quick_first

pytestmark = pytest.mark.skipif(not emulator.available(), reason="needs g++")

K = 128
VARIANTS = [
    Rows(256, 2, 1),
    Filter(256, 1, 2, 1, capacity=512),
    Filter(256, 2, 1, 1, capacity=512),
]
INFINITY, NAN = float("inf"), float("nan")


@pytest.fixture(params=quick_first(VARIANTS), ids=["rows", "filter", "cluster"])
def variant(request, monkeypatch, tmp_path):
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
    monkeypatch.setattr(CudaKernel, "__call__", emulator.launch)
    monkeypatch.setattr(module, "plan", lambda rows, width: request.param)
    torch.manual_seed(0)
    return request.param


def check(scores, starts, ends):
    offset = torch.zeros_like(ends) if starts is None else starts
    found = topk(scores, ends, K, starts=starts)
    assert torch.equal(in_order(found), expected(scores, offset, ends, K))


@pytest.mark.slow
def test_distributions(variant):
    """Ordinary scores; ties at the cut and everywhere; special values; a sample that misleads."""
    width = 2000
    column = torch.arange(width)
    rows = [
        torch.randn(width),
        torch.zeros(width),
        torch.randint(0, 9, (width,)).float(),
        (torch.randn(width) * 64).round(),
        torch.randn(width).relu(),
        torch.where(torch.rand(width) < 0.02, NAN, torch.randn(width)),
        torch.where(torch.rand(width) < 0.97, -INFINITY, torch.randn(width)),
        torch.where(column % 2 == 0, torch.rand(width) - 9, torch.rand(width)),
        torch.where(column % 2 == 1, torch.rand(width) - 9, torch.rand(width)),
        # the second block of a cluster has all of the best, and its sample only them
        torch.where((column // 128 % 2 == 1) & (column % 2 == 0), 25.0, 0.0)
        .add(25 * torch.rand(width))
        .exp(),
    ]
    scores = torch.stack(rows)
    check(scores, None, torch.full((len(rows),), width, dtype=torch.int32))


def clusters(width=2000):
    """Rows whose keys lie close together, in one place or in two far apart."""
    place, normal = torch.randperm(width), torch.randn(width)
    return torch.stack([
        normal,
        torch.where(place < K - 1, 1e4 + 100 * normal, 5 + 1e-4 * torch.rand(width)),
        torch.where(place < K + 60, 100.0, -100.0) + 1e-3 * normal,
        torch.where(place < K // 2, 100.0, -100.0) + 1e-3 * normal,
        torch.where(place < K, 1e9 * torch.rand(width), -1e-9 * torch.rand(width)),
        8 + 1e-4 * normal,  # on both sides of a bin's end
        1000 + 0.1 * normal,
    ])  # fmt: skip


def test_clusters(variant):
    scores = clusters()
    check(scores, None, torch.full((len(scores),), scores.shape[1], dtype=torch.int32))


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS[:1], ids=["rows"], indirect=True)
def test_two_histograms_of_all_keys_tell_clusters_apart(variant):
    scores = clusters()
    source, defines, _ = module.compile_options(variant, paged=False)
    library = emulator._library(source, "topk_rows", tuple(sorted(defines.items())))
    held = variant.threads * 4 * variant.groups
    library.take_counted()  # of other tests
    turns = []
    for row in scores:
        check(row[None], None, torch.tensor([len(row)], dtype=torch.int32))
        turns.append(library.take_counted() // held)  # what is left is the sample's
    assert turns == [1, 2, 2, 2, 1, 1, 1]  # a second where two clusters lie far apart


def passes(variant, scores):
    """Times that the kernel reads its row of scores, each row in a launch of its own; checked."""
    width = scores.shape[1]
    source, defines, _ = module.compile_options(variant, paged=False)
    library = emulator._library(source, "topk_filter", tuple(sorted(defines.items())))
    batch = variant.threads * variant.cluster * variant.batch  # groups
    once = math.ceil(width / 4 / batch) * batch
    library.take_loads()  # of other tests
    times = []
    for row in scores:
        check(row[None], None, torch.tensor([width], dtype=torch.int32))
        times.append(library.take_loads() / once)
    return times


def sampled_columns(threads, width):
    """bool ``[width]``: the columns that ``sampled_group`` in ``topk_stream.cuh`` looks at."""
    bits, inside = threads.bit_length() - 1, width // 4 - 2
    sampled = torch.zeros(width, dtype=torch.bool)
    for number in range(threads):
        random = number * 0x9E3779B1 % 2**32
        random = (random ^ random >> 15) * 0x85EBCA77 % 2**32
        group = ((number << (32 - bits) | random >> bits) * inside >> 32) + 1
        sampled[4 * group : 4 * group + 4] = True
    return sampled


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS[1:], ids=["filter", "cluster"], indirect=True)
class TestPasses:
    """Passes over rows: one, but for those whose sample misleads."""

    def test_the_distribution_does_not_matter(self, variant):
        width = 6000
        column, normal = torch.arange(width), torch.randn(width)
        rows = [
            normal,
            10 + normal,
            1000 + 0.1 * normal,
            -25 + 4.7 * normal,
            torch.rand(width),
            normal.exp(),
            (100 * normal).round(),
            torch.full((width,), 3.0),
            torch.where(torch.rand(width) < 0.5, 1.0, -INFINITY),
            torch.where(torch.rand(width) < 0.5, INFINITY, normal),
            normal.sort().values,
            normal.sort(descending=True).values,
            torch.where(column % 64 < 32, 5 + normal, normal),
            torch.where((column > 2000) & (column < 2300), 9 + normal, normal),
        ]
        assert passes(variant, torch.stack(rows)) == [1] * len(rows)

    def test_what_was_counted_corrects_a_sample_that_holds_all_of_the_best(self, variant):
        """Then too few scores reach the first threshold."""
        sampled = sampled_columns(variant.threads, 6000)
        row = torch.rand(6000) + 10 * sampled
        assert passes(variant, row[None]) == [2]

    def test_counting_finds_what_the_sample_does_not_show(self, variant):
        """Too low or full of NaN: two passes fail, one to four count, one sends."""
        sampled = sampled_columns(variant.threads, 6000)
        rows = [
            torch.rand(6000) - 10 * sampled,
            torch.where(torch.rand(6000) < 0.4, NAN, torch.randn(6000)),
        ]
        assert all(4 <= times <= 7 for times in passes(variant, torch.stack(rows)))


def test_ragged(variant):
    starts = torch.tensor([0, 1, 7, 3, 900, 2, 5], dtype=torch.int32)
    lengths = torch.tensor([0, -1, K, K + 1, 1000, 1300, 130], dtype=torch.int32)
    check(torch.randn(7, 2013)[:, 1:2001], starts, starts + lengths)


def test_ties_of_rows_that_are_nearly_all_kept(variant):
    """One tie at the cut, a few, more than a warp ranks, all of the row."""
    width = K + 10
    place = torch.arange(width)[torch.randperm(width)]
    rows = [
        torch.randn(width),
        torch.full((width,), -7.0),
        1000 + 0.01 * (place // 4),
        torch.where(place < 60, 2.0, torch.rand(width)),
        torch.where(place < 60, 1.0 + 1e-6 * place, 1.0),
        torch.where(place < 5, -INFINITY, 1e30 * torch.randn(width)),
        torch.where(place < 130, NAN, 0.0),
    ]
    check(torch.stack(rows), None, torch.full((len(rows),), width, dtype=torch.int32))


def test_physical_rows(variant):
    rows, width, block_size = 3, 1500, 16
    scores, blocks = torch.randn(rows, width), -(-width // block_size)
    tables = torch.randperm(2 * blocks, dtype=torch.int32).view(2, blocks)
    tables[1, 5] = -1
    of_row = torch.tensor([1, 0, 1], dtype=torch.int32)
    ends = torch.tensor([width, 100, 1200], dtype=torch.int32)
    columns = expected(scores, torch.zeros_like(ends), ends, K)
    pages = tables[of_row[:, None].long(), (columns // block_size).clamp(min=0).long()]
    want = torch.where((columns < 0) | (pages < 0), -1, pages * block_size + columns % block_size)
    found = topk(scores, ends, K, block_tables=tables, requests=of_row, block_size=block_size)
    assert torch.equal(in_order(found), in_order(want))
