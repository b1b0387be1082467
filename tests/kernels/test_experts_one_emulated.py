"""The experts of one token in one launch, on the CPU: blocks at once, a thread for a thread."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("cuda.bindings")

from dsa_compile.kernels.cuda import experts_fp8_one as one
from dsa_compile.kernels.cuda.launch import CudaKernel
from dsa_compile.ops.experts_fp8 import experts_fp8 as reference
from tests.kernels import emulator
from tests.quick_cases import quick_first

pytestmark = pytest.mark.skipif(not emulator.available(), reason="needs g++")

HEADERS = ("attention_emulator.h", "experts_emulator.h")
WRITTEN_OUT = (
    "load_weight",
    "multiply_e4m3",
    "load_acquire",
    "add_acquire_release",
    "store_release",
)
"""Functions that ``experts_emulator.h`` has in place of the sources'."""


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    header = tmp_path / "common.h"
    parts = [Path(__file__).parent / name for name in HEADERS]
    header.write_text("".join(part.read_text() for part in (emulator.HEADER, *parts)))
    usual = emulator._portable

    def portable(text: str) -> str:
        for name in WRITTEN_OUT:
            text = re.sub(rf"DEVICE \w+ {name}\([^{{]*{{\n.*?\n}}\n", "", text, flags=re.DOTALL)
        return usual(text.replace("extern __shared__ __align__(128) u8 memory[];", ""))

    def launch(kernel: CudaKernel, grid, block: int, *arguments: object) -> None:
        all_at_once = kernel.defines | {"CLUSTER": grid[0]}
        kernel = CudaKernel(kernel.source, kernel.name, all_at_once)
        emulator.launch(kernel, grid, block, *arguments)

    monkeypatch.setattr(emulator, "HEADER", header)
    monkeypatch.setattr(emulator, "_portable", portable)
    monkeypatch.setattr(CudaKernel, "__call__", launch)
    one._kernel.cache_clear()
    one._counters.cache_clear()  # they count launches of one number of blocks
    torch.manual_seed(0)


def operands(experts: int, hidden: int, inner: int, top_k: int, index: torch.dtype):
    """Whole numbers, whose products add up exactly within a block in whatever order."""

    def whole_numbers(*shape: int) -> torch.Tensor:
        return torch.randint(-4, 5, shape).float().to(torch.float8_e4m3fn)

    def scales(*shape: int) -> torch.Tensor:
        return torch.rand(shape) + 0.5

    return (
        whole_numbers(1, hidden),
        scales(1, hidden // 128),
        torch.rand(1, top_k),
        torch.randint(-2, experts + 2, (1, top_k), dtype=index),
        whole_numbers(experts, 2 * inner, hidden),
        scales(experts, 2 * inner // 128, hidden // 128) * 1e-3,
        whole_numbers(experts, hidden, inner),
        scales(experts, hidden // 128, inner // 128) * 1e-2,
    )


@pytest.mark.parametrize(
    ("hidden", "inner", "top_k", "processors", "index"),
    quick_first(
        [
            (512, 128, 3, 16, torch.int32),  # two tiles of down, 32 rows a block
            (512, 384, 4, 17, torch.int64),  # a block has values of two experts
            (256, 128, 1, 17, torch.int64),
            (768, 256, 5, 16, torch.int64),  # three tiles
            (512, 128, 2, 32, torch.int32),  # one warp, which has all of K
            (1024, 128, 2, 32, torch.int32),  # a tile of down for each warp, half of K
            (1024, 128, 2, 64, torch.int32),  # tiles of down that warps share
            (512, 128, 1, 130, torch.int64),  # blocks without hidden values
        ]
    ),
    ids=str,
)
def test_as_the_reference(monkeypatch, hidden, inner, top_k, processors, index) -> None:
    monkeypatch.setattr(one, "multiprocessors", lambda _: processors)
    args = operands(4, hidden, inner, top_k, index)
    if not ((args[3] >= 0) & (args[3] < 4)).any():
        args[3][0, 0] = 2
    want = reference(*args).float()
    for _ in range(2):  # the counter of arrivals is not cleared in between
        monkeypatch.setattr(one, "_turn", iter([7]))
        got = one.experts_one(*args).float()
        assert ((got - want).norm() / want.norm()).item() < 6e-3


@pytest.mark.parametrize("chosen", [(2, -1, 0), (3, 3, -2), (7, 1, 1 << 40)], ids=str)
def test_absent_experts_and_one_twice(monkeypatch, chosen) -> None:
    monkeypatch.setattr(one, "multiprocessors", lambda _: 16)
    args = operands(4, 256, 128, 3, torch.int64)
    args[3][0] = torch.tensor(chosen)
    want = reference(*args).float()
    got = one.experts_one(*args).float()
    assert ((got - want).norm() / want.norm()).item() < 6e-3


def test_no_expert_is_here(monkeypatch) -> None:
    monkeypatch.setattr(one, "multiprocessors", lambda _: 16)
    args = operands(4, 256, 128, 2, torch.int64)
    args[3].fill_(-1)
    assert not one.experts_one(*args).any()


def test_what_shared_memory_does_not_hold_is_not_taken() -> None:
    taken = one.Shape(7168, 256, 9, 132)
    assert taken.fits
    assert taken.down_tiles == 4
    assert one.Shape(7168, 2048, 9, 132).fits
    assert not replace(taken, hidden=7168 + 128).fits
    assert not replace(taken, inner=64 * 1024).fits
    assert not replace(taken, top_k=33).fits
