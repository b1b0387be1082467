"""The kernels that put rows into the order of their experts, on the CPU, a thread for a thread."""

import pytest
import torch

pytest.importorskip("cuda.bindings")

from dsa_compile.kernels.cuda import experts_fp8_many as many
from dsa_compile.kernels.cuda.launch import CudaKernel
from tests.kernels import emulator
from tests.quick_cases import quick_first

pytestmark = pytest.mark.skipif(not emulator.available(), reason="needs g++")

HIDDEN, TOP_K, EXPERTS = 256, 3, 5


def order(indices: torch.Tensor, x: torch.Tensor, x_scale: torch.Tensor) -> many.Rows:
    kernels = many.row_kernels(EXPERTS, HIDDEN, TOP_K, indices.dtype, many.SHAPE.tokens)
    return many.order_rows(kernels, indices, x, x_scale, EXPERTS, many.SHAPE.tokens)


@pytest.mark.parametrize("index", quick_first([torch.int64, torch.int32]), ids=str)
@pytest.mark.parametrize("tokens", [7, 800])
def test_rows_and_units(monkeypatch: pytest.MonkeyPatch, tokens: int, index: torch.dtype) -> None:
    monkeypatch.setattr(CudaKernel, "__call__", emulator.launch)
    torch.manual_seed(0)
    indices = torch.randint(-1, EXPERTS + 1, (tokens, TOP_K), dtype=index)
    indices[indices == 3] = 1  # an expert of many, one of none
    x = torch.randint(0, 256, (tokens, HIDDEN), dtype=torch.uint8)
    x_scale = torch.rand(tokens, HIDDEN // 128)
    rows = order(indices, x, x_scale)

    flat = indices.flatten().long()
    present = (flat >= 0) & (flat < EXPERTS)
    assert torch.equal(rows.row_of >= 0, present)
    counts = torch.bincount(flat[present], minlength=EXPERTS)
    padded = -(-counts // 8) * 8
    starts = padded.cumsum(0) - padded
    for expert in range(EXPERTS):
        of_expert = rows.row_of[flat == expert].sort().values
        first = int(starts[expert])
        assert of_expert.tolist() == list(range(first, first + int(counts[expert])))

    pair = present.nonzero().flatten()
    row = rows.row_of[pair].long()
    chunks = rows.values.view(HIDDEN // 128, -1, 8, 16)
    for chunk in range(8):
        got = chunks[:, row, chunk ^ (row % 8)].transpose(0, 1)
        assert torch.equal(got, x.view(tokens, -1, 8, 16)[pair // TOP_K, :, chunk])
    assert torch.equal(rows.scales[:, row].T, x_scale[pair // TOP_K])

    pairs, singles, end, _ = rows.unit_counts.tolist()
    assert end == int(padded.sum())
    work = []
    for number, (expert, first, count, width) in enumerate(rows.units[: pairs + singles].tolist()):
        assert width <= many.SHAPE.tokens
        assert count <= (2 if number < pairs else 1) * width
        assert number >= pairs or count > width  # both blocks of a cluster have rows
        work += [(expert, r) for r in range(first, first + count)]
        assert rows.finished[number] == 0
    expected = zip(starts.tolist(), counts.tolist(), strict=True)
    assert sorted(work) == [(e, s + i) for e, (s, n) in enumerate(expected) for i in range(n)]
