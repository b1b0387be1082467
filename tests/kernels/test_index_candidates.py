"""Selection from lists of candidates: the compiled kernels, and on a GPU, what they select."""

from itertools import pairwise

import pytest
import torch

from dsa_compile.kernels.cuda import index_candidates as lists
from dsa_compile.kernels.cuda import index_topk
from dsa_compile.kernels.cuda.compiler import build
from dsa_compile.kernels.cuda.index_candidates import Paged
from tests.kernels.test_index_logits import E4M3, e4m3, needs_gpu, pages, sass_and_usage

KERNELS = {
    "sample": lambda: lists.sample_kernel(64, 10),
    "small sample": lambda: lists.sample_kernel(16, 9),
    "candidates": lambda: lists.candidates_kernel(64, 144),
    "candidates of 32 heads": lambda: lists.candidates_kernel(32, 208),
    "select": lambda: lists.select_kernel(144),
    "select from long lists": lambda: lists.select_kernel(208),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", KERNELS)
def test_compiles_to_what_it_relies_on(name, tmp_path):
    kernel = KERNELS[name]()
    cubin = build(kernel.source, arch="sm_90a", defines=kernel.defines)
    sass, usage = sass_and_usage(cubin, tmp_path / "kernel.cubin")
    assert usage["LOCAL"] == usage["STACK"] == 0
    assert kernel.shared <= 227 * 1024
    if "candidates" in name:
        assert "STG.E.64" in sass  # a score and its column in one store
    if "sample" in name:
        assert "LDGSTS.E.BYPASS.128" in sass
        assert kernel.defines["KEY_STAGES"] >= 4  # a stage for each copying warp


def test_the_written_scores_of_a_pass_stay_within_the_budget(monkeypatch):
    monkeypatch.setattr("dsa_compile.kernels.cuda.index_candidates.multiprocessors", lambda *_: 132)
    limit = 512 << 20
    for columns in (lists.SHORT_KEYS, 65536, lists.MAX_COLUMNS):
        rows = lists.most_rows(columns, limit)
        assert rows > 0
        assert lists.memory_bytes(rows, columns) <= limit
        assert lists.memory_bytes(rows + 1, columns) > limit
    assert lists.most_rows(65536, 1 << 20) == 0


# ---- on a GPU --------------------------------------------------------------------------------


def paged(rows, contexts, heads=64, block_size=64, scale=None, e4m3_byte=None) -> Paged:
    """Requests whose pages lie in random order; ``scale(position)`` instead of random scales."""
    width = max(-(-n // block_size) for n in contexts) + 1
    count = len(rows) * width + 3
    held = pages(count, block_size)
    tables = torch.randperm(count, device="cuda")[: len(rows) * width]
    tables = tables.view(len(rows), width).int()
    if e4m3_byte is not None:
        held.cache[..., :].flatten(1)[:, : block_size * 128] = e4m3_byte
    if scale is not None:
        position = torch.arange(width * block_size, device="cuda").float()
        scales = scale(position).view(width, block_size).float().contiguous()
        for table in tables:
            held.cache.flatten(1)[table.long(), block_size * 128 :] = scales.view(torch.uint8)
    total = sum(rows) + 2  # the last two are padding
    starts = torch.tensor([0, *rows], device="cuda").cumsum(0).int()
    q, weights = e4m3(total, heads, 128), torch.randn(total, heads, device="cuda")
    if scale is not None:
        q, weights = q.float().abs().to(E4M3), weights.abs()
    lengths = torch.tensor(contexts, dtype=torch.int32, device="cuda")
    return Paged(q, weights, held.cache, tables, starts, lengths)


def written(x: Paged, topk: int) -> torch.Tensor:
    memory = torch.full(
        (4 * x.q.shape[0] * x.columns,), 0x7F, dtype=torch.uint8, device="cuda"
    )  # larger than any score
    return index_topk._score_topk(x, topk, (0, x.q.shape[0]), memory)


def listed(x: Paged, topk: int, cuts=(), poison=0x7F) -> torch.Tensor:
    rows = x.q.shape[0]
    size = lists.memory_bytes(rows, x.columns)
    memory = torch.full((size,), poison, dtype=torch.uint8, device="cuda")
    parts = [lists.candidate_topk(x, topk, part, memory) for part in pairwise([0, *cuts, rows])]
    return torch.cat(parts)


def same(got, want) -> bool:
    return torch.equal(got.sort(1).values, want.sort(1).values)


@pytest.fixture
def failed(monkeypatch):
    """Counter of the rows whose lists could not decide."""
    counts = []
    select = lists.select_scores

    def counting(*args, wanted, **kwargs):
        counts.append(wanted)
        return select(*args, wanted=wanted, **kwargs)

    monkeypatch.setattr(lists, "select_scores", counting)
    return lambda: sum(int(rows.sum()) for rows in counts)


@needs_gpu
@pytest.mark.parametrize(
    ("rows", "contexts", "heads", "block_size", "topk", "cuts"),
    [
        ([300], [9000], 64, 64, 2048, ()),
        ([300, 7, 1, 1000], [9000, 30, 5000, 40000], 64, 64, 2048, ()),
        ([300, 7, 0, 1000], [9000, 7, 50, 40000], 64, 64, 2048, (5, 303, 900)),
        ([90, 50], [30000, 2100], 32, 16, 2048, ()),
        ([90, 50], [30000, 4100], 16, 128, 512, ()),
        ([5000], [5000], 64, 64, 2048, ()),
    ],
    ids=str,
)
def test_selects_what_the_written_scores_give(
    rows, contexts, heads, block_size, topk, cuts, failed
):
    x = paged(rows, contexts, heads, block_size)
    got = listed(x, topk, cuts)
    assert same(got, written(x, topk))
    assert torch.equal(got, listed(x, topk, cuts, poison=0x80))
    assert not failed()


@needs_gpu
@pytest.mark.parametrize(
    "scale",
    [
        lambda at: 1 + at,
        lambda at: 1e6 - at,
        lambda at: torch.where((at > 9000) & (at < 11500), 8.0, 0.2) + at / 1e7,
    ],
    ids=["rising", "falling", "a passage"],
)
def test_where_the_best_keys_lie_does_not_matter(scale, failed):
    x = paged([200, 400], [9000, 30000], scale=scale, e4m3_byte=0x38)
    assert same(listed(x, 2048), written(x, 2048))
    assert not failed()


@needs_gpu
@pytest.mark.parametrize(
    "scale",
    [
        torch.ones_like,
        lambda at: torch.where(at % 64 < 4, 2.0, 1.0) + at / 1e7,
        lambda at: torch.where(at % 3 == 0, float("nan"), 1 + at),
        lambda at: torch.where(at % 3 == 0, float("inf"), 1 + at),
    ],
    ids=["all equal", "all in few lists", "NaN", "infinities"],
)
def test_rows_whose_lists_cannot_tell_are_right_all_the_same(scale, failed):
    x = paged([100, 50], [30000, 3000], scale=scale, e4m3_byte=0x38)
    assert same(listed(x, 2048), written(x, 2048))
    assert failed()


@needs_gpu
def test_in_a_cuda_graph(failed):
    x = paged([1100], [33000])
    assert index_topk.prefers_lists(x)
    args = (x.q, x.weights, x.cache, x.block_tables, x.cu_seqlens, x.context_lens, 2048)
    graph = torch.cuda.CUDAGraph()
    index_topk.paged_index_topk_fp8(*args)
    with torch.cuda.graph(graph):
        got = index_topk.paged_index_topk_fp8(*args)
    for context in (33000, 20000, 1100):
        x.context_lens.fill_(context)
        x.q.copy_(e4m3(*x.q.shape))
        graph.replay()
        assert same(got, written(x, 2048))
