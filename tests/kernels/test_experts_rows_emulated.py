"""The kernels that put rows into the order of their experts, on the CPU, a thread for a thread."""

from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("cuda.bindings")

from dsa_compile.kernels.cuda import experts_fp8_many as many
from dsa_compile.kernels.cuda.launch import CudaKernel
from tests.kernels import emulator
from tests.quick_cases import quick_first

pytestmark = pytest.mark.skipif(not emulator.available(), reason="needs g++")

HIDDEN, TOP_K, EXPERTS = 256, 3, 5


@pytest.mark.slow
@pytest.mark.parametrize("index", quick_first([torch.int64, torch.int32]), ids=str)
@pytest.mark.parametrize("tokens", [7, 190, 320, 800])
def test_rows_and_slots(monkeypatch: pytest.MonkeyPatch, tokens: int, index: torch.dtype) -> None:
    monkeypatch.setattr(CudaKernel, "__call__", emulator.launch)
    torch.manual_seed(tokens)
    indices = torch.randint(-1, EXPERTS + 1, (tokens, TOP_K), dtype=index)
    indices[indices == 3] = 1  # an expert of many, one of none
    x = torch.randint(0, 256, (tokens, HIDDEN), dtype=torch.uint8)
    x_scale = torch.rand(tokens, HIDDEN // 128)
    kernels = many.row_kernels(EXPERTS, HIDDEN, TOP_K, index)
    rows = many.order_rows(kernels, indices, x, x_scale, EXPERTS)

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

    slots, end = rows.slot_counts.tolist()
    assert end == int(padded.sum())
    assert slots <= len(rows.slots)
    assert not rows.finished[:slots].any()
    assert [tuple(slot) for slot in rows.slots[:slots].tolist()] == [
        slot
        for expert in range(EXPERTS)
        for slot in slots_of(expert, int(starts[expert]), int(counts[expert]))
    ]


def slots_of(expert: int, row: int, rows: int) -> Iterator[tuple[int, int, int, int]]:
    """256 rows at a time in two slots (kinds 1 and 2); a rest of up to 128 rows in one (0)."""
    while rows > 128:
        here = min(rows, 256)
        yield from ((expert, row, here, kind) for kind in (1, 2))
        row, rows = row + here, rows - here
    if rows > 0:
        yield expert, row, rows, 0
