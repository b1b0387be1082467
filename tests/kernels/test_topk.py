"""Top-k kernels: which is chosen, what they refuse and compile to, and on a GPU their results."""

import itertools

import pytest
import torch

from dsa_compile.kernels.cuda.compiler import build, nvrtc_version
from dsa_compile.kernels.cuda.topk import (
    MAX_WIDTH,
    Filter,
    Rows,
    compile_options,
    plan,
    topk,
    variants,
)
from dsa_compile.ops.selection import best_first
from tests.kernels.compile_only import inspect

gpu = pytest.mark.gpu(least=(9, 0))
INFINITY, NAN = float("inf"), float("nan")


def expected(scores, starts, ends, k):
    """Columns from the row's start, ascending, then -1; on the CPU."""
    out = torch.full((len(scores), k), -1, dtype=torch.int32)
    for row, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        if end > start:
            columns = best_first(scores[row : row + 1, start:end].cpu(), k)[0].sort().values
            out[row, : len(columns)] = columns.int()
    return out


def in_order(columns):
    """Ascending, -1 last."""
    last = torch.where(columns < 0, torch.iinfo(torch.int32).max, columns).sort(1).values
    return torch.where(last == torch.iinfo(torch.int32).max, -1, last).int().cpu()


def test_plan_fits():
    widths = [1, 2048, 8192, 8193, 9295, 12288, 16384, 16387, 32768, 65536, 131072, MAX_WIDTH]
    for rows, width in itertools.product((1, 2, 16, 17, 64, 132, 133, 256, 2048, 9999), widths):
        variant = plan(rows, width)
        assert variant in variants()
        assert isinstance(variant, Filter) or width <= variant.width


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scores": torch.zeros(2, 8).double()}, "scores as float32"),
        ({"scores": torch.zeros(8, 2).t()}, "contiguous rows"),
        ({"scores": torch.zeros(1, 1).expand(2, MAX_WIDTH + 1)}, "contiguous rows"),
        ({"k": 6}, "multiple of 4"),
        ({"k": 4096}, "up to 2048"),
        ({"k": 0}, "up to 2048"),
        ({"ends": torch.zeros(2)}, "ends as contiguous int32"),
        ({"ends": torch.zeros(3, dtype=torch.int32)}, "ends as contiguous int32"),
        ({"starts": torch.zeros(2, dtype=torch.int64)}, "starts as contiguous int32"),
        ({"block_size": 48}, "power of two"),
        ({"block_tables": torch.zeros(3, 4, dtype=torch.int32)}, "R = 2 unless"),
        ({"block_tables": torch.zeros(2, 4)}, "block_tables as int32"),
    ],
)
def test_refuses(change, message):
    args = {"scores": torch.zeros(2, 8), "ends": torch.zeros(2, dtype=torch.int32), "k": 4}
    with pytest.raises(ValueError, match=f"dsa::topk takes .*{message}"):
        topk(**args | change)


def test_refuses_rows_too_long():
    with pytest.raises(ValueError, match="at most"):
        topk(torch.empty(1, MAX_WIDTH + 4), torch.zeros(1, dtype=torch.int32), 4)


def name_of(variant) -> str:
    return "-".join(str(value) for value in vars(variant).values())


@pytest.mark.slow
@pytest.mark.parametrize("variant", variants(), ids=name_of)
def test_compiles_for_hopper(variant):
    source, defines, shared = compile_options(variant, paged=True)
    binary = inspect(source, build(source, arch="sm_90a", defines=defines), shared)
    # NVRTC 13.5 keeps 16 bytes of one variant on the stack that 13.0 keeps in registers
    newer = nvrtc_version() >= (13, 5) and variant == Rows(256, 8, 4)
    assert binary.local_bytes <= (16 if newer else 0)
    assert binary.registers * variant.threads * variant.blocks <= 65536
    static = 35 * 1024 if isinstance(variant, Rows) else 0
    assert variant.blocks * (binary.shared_bytes + static + 1024) <= 228 * 1024
    for instruction in ("LDG.E.EF.128", "ATOMS.POPC.INC", "REDUX.SUM", "ACQBULK", "VIADDMNMX"):
        assert instruction in binary.sass
    # nothing is read before the wait for the kernels that write it
    assert binary.sass.index("ACQBULK") < binary.sass.index("LDG")
    if isinstance(variant, Filter) and variant.cluster > 1:
        assert "UCGABAR_ARV" in binary.sass


@pytest.mark.slow
@pytest.mark.parametrize("variant", variants(), ids=name_of)
def test_compiles_for_blackwell(variant):
    source, defines, shared = compile_options(variant, paged=False)
    binary = inspect(source, build(source, arch="sm_100a", defines=defines), shared)
    assert binary.local_bytes == 0
    assert binary.sass.index("ACQBULK") < binary.sass.index("LDG")


@pytest.fixture(scope="module")
def poisoned():
    """torch.empty fills what it returns."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def rows_of_every_kind(width: int) -> torch.Tensor:
    """fp32 [n, width]: common distributions, ties, special values, and orders that mislead."""
    uniform, normal = torch.rand(8, width, device="cuda"), torch.randn(8, width, device="cuda")
    column = torch.arange(width, device="cuda")
    fill = [torch.full((width,), x, device="cuda") for x in (0.0, INFINITY, -INFINITY, NAN)]
    rows = [
        *fill,
        normal[0],
        normal[1].relu(),
        100 + uniform[0],
        1e-42 * normal[2],  # denormal
        (20 * normal[3]).exp(),
        column.float(),
        -column.float(),
        (5 * uniform[1]).floor(),
        torch.where(uniform[2] < 0.5, INFINITY, -INFINITY),
        torch.where(uniform[2] < 0.9, -INFINITY, normal[4]),
        torch.where(uniform[2] < 0.01, NAN, normal[4]),
        torch.where(uniform[2] < 0.5, -fill[3], normal[4]),
        torch.where(uniform[2] < 0.5, 0.0, -fill[0]),
        # samples are taken at such strides
        *(torch.where(column % n == 0, uniform[3], uniform[4] - 1) for n in (4, 16, 128)),
        *(torch.where(column % n == 0, uniform[3] - 1, uniform[4]) for n in (4, 16, 128)),
        uniform[5].sort().values,
        uniform[5].sort(descending=True).values,
        torch.where((column // 3000) % 5 == 3, normal[5] + 8, normal[5]),  # a hot stretch
    ]
    return torch.stack([row.expand(width) for row in rows])


CASES = [
    (8192, 2048), (9295, 2048), (6001, 512), (16384, 1024), (12288, 4), (2052, 2048),
    (32768, 2048), (65535, 512), (131072, 2048), (163840, 1024), (700001, 2048),
]  # fmt: skip


@gpu
@pytest.mark.parametrize("many", [False, True], ids=["few rows", "many rows"])
@pytest.mark.parametrize(("width", "k"), CASES)
def test_selects_exactly(width, k, many, poisoned):
    scores = rows_of_every_kind(width)
    expanded = scores.repeat(16, 1) if many and width < 40000 else scores
    ends = torch.full((len(scores),), width, dtype=torch.int32)
    want = expected(scores, torch.zeros_like(ends), ends, k)
    copies = len(expanded) // len(scores)
    found = topk(expanded, ends.cuda().repeat(copies), k)
    assert torch.equal(in_order(found), want.repeat(copies, 1))


@gpu
@pytest.mark.parametrize(("width", "k"), CASES)
def test_ragged_rows(width, k, poisoned):
    scores = rows_of_every_kind(width)
    count = len(scores)
    starts = torch.randint(0, 50, (count,), dtype=torch.int32)
    ends = torch.randint(0, width + 1, (count,), dtype=torch.int32)
    short = torch.tensor([0, -1, 1, k - 1, k, k + 1, k + 2], dtype=torch.int32)
    ends[: len(short)] = (starts[: len(short)] + short).clamp(max=width)
    ends[-1] = width
    found = topk(scores, ends.cuda(), k, starts=starts.cuda())
    assert torch.equal(in_order(found), expected(scores, starts, ends, k))


@gpu
@pytest.mark.parametrize("rows", [1, 5, 33, 64, 300])
@pytest.mark.parametrize("width", [5000, 30000])
def test_strides_and_bounds(rows, width, poisoned):
    """Rows that begin anywhere in memory, ends past the row, lengths past the bound."""
    scores = torch.randn(rows, width + 7, device="cuda")[:, 3 : 3 + width]
    ends = torch.randint(0, width + 1, (rows,), dtype=torch.int32)
    ends[0] = width + 1000
    bound = width - 13
    found = topk(scores, ends.cuda(), 512, max_length=bound)
    want = expected(scores, torch.zeros_like(ends), ends.clamp(max=bound), 512)
    assert torch.equal(in_order(found), want)


@gpu
@pytest.mark.parametrize("block_size", [1, 16, 64])
@pytest.mark.parametrize("width", [4000, 9295, 40000])
def test_physical_rows(block_size, width, poisoned):
    rows, requests, k = 24, 5, 2048
    scores = torch.randn(rows, width, device="cuda")
    blocks = -(-width // block_size)
    tables = torch.randperm(requests * blocks, dtype=torch.int32).view(requests, blocks)
    of_row = torch.randint(0, requests, (rows,), dtype=torch.int32)
    ends = torch.randint(1, width + 1, (rows,), dtype=torch.int32)
    ends[:4] = torch.tensor([0, k, k + 1, width])
    columns = expected(scores, torch.zeros_like(ends), ends, k)
    missing = columns[3, 7] // block_size
    tables[of_row[3], missing] = -1
    pages = tables[of_row[:, None].long(), (columns // block_size).clamp(min=0).long()]
    want = torch.where((columns < 0) | (pages < 0), -1, pages * block_size + columns % block_size)
    arguments = {"requests": of_row.cuda(), "block_size": block_size}
    found = topk(scores, ends.cuda(), k, block_tables=tables.cuda(), **arguments)
    assert torch.equal(in_order(found), in_order(want))
    fewer = topk(scores, ends.cuda(), k, block_tables=tables[:, :-1].cuda(), **arguments)
    cut = ends.clamp(max=(blocks - 1) * block_size)
    held = expected(scores, torch.zeros_like(ends), cut, k)
    pages = tables[of_row[:, None].long(), (held // block_size).clamp(min=0).long()]
    want = torch.where((held < 0) | (pages < 0), -1, pages * block_size + held % block_size)
    assert torch.equal(in_order(fewer), in_order(want))


@gpu
@pytest.mark.parametrize("variant", variants() if torch.cuda.is_available() else [], ids=name_of)
@pytest.mark.parametrize("width", [6000, 131072])
def test_every_variant(variant, width, monkeypatch, poisoned):
    if isinstance(variant, Rows) and width > variant.width:
        pytest.skip("too wide")
    monkeypatch.setattr("dsa_compile.kernels.cuda.topk.plan", lambda rows, width: variant)
    scores = rows_of_every_kind(width)
    ends = torch.full((len(scores),), width, dtype=torch.int32)
    found = topk(scores, ends.cuda(), 2048)
    assert torch.equal(in_order(found), expected(scores, torch.zeros_like(ends), ends, 2048))


@gpu
@pytest.mark.parametrize(("rows", "width"), [(64, 9295), (3, 131072), (40, 70000), (300, 8192)])
def test_same_bits_in_every_run_and_in_a_graph(rows, width):
    scores = torch.randn(rows, width, device="cuda").mul(50).round()  # many ties
    ends = torch.randint(0, width + 1, (rows,), device="cuda", dtype=torch.int32)
    first = topk(scores, ends, 2048)
    for _ in range(20):
        assert torch.equal(topk(scores, ends, 2048), first)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = topk(scores, ends, 2048)
    captured.fill_(-7)
    graph.replay()
    assert torch.equal(captured, first)


@gpu
def test_after_a_kernel_that_writes_what_it_reads():
    """Kernel of top-k starts before the kernels ahead of it have ended, and must wait for them."""
    scores = torch.empty(64, 9295, device="cuda")
    ends = torch.zeros(64, device="cuda", dtype=torch.int32)
    fresh = [torch.randn_like(scores) for _ in range(8)]
    lengths = [torch.full_like(ends, 9295 - i) for i in range(8)]
    results = []
    for values, length in zip(fresh, lengths, strict=True):
        scores.copy_(values)
        ends.copy_(length)
        results.append(topk(scores, ends, 2048))
    for values, length, found in zip(fresh, lengths, results, strict=True):
        assert torch.equal(topk(values.clone(), length, 2048), found)
