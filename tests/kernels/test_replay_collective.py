"""A collective's stand-in: copies of the operand, on the emulator, and as compiled."""

import time

import pytest
import torch

pytest.importorskip("cuda.bindings")

from dsa_compile.kernels.cuda.compiler import build
from dsa_compile.kernels.cuda.launch import CudaKernel
from dsa_compile.kernels.cuda.replay_collective import (
    replay_choices,
    replay_collective,
    replay_many,
    turned_choices,
)
from tests.kernels import emulator
from tests.kernels.compile_only import inspect


@pytest.mark.skipif(not emulator.available(), reason="needs g++")
def test_parts_are_copies_and_the_time_passes(monkeypatch) -> None:
    monkeypatch.setattr(CudaKernel, "__call__", emulator.launch)
    x = torch.randn(3, 1000, dtype=torch.bfloat16)
    for copies in (1, 3):
        out = torch.zeros(copies, *x.shape, dtype=x.dtype)
        wait = torch.tensor([30_000_000])
        began = time.perf_counter()
        replay_collective(x, out, wait)
        assert time.perf_counter() - began >= 0.03
        assert all(torch.equal(part, x) for part in out)


@pytest.mark.skipif(not emulator.available(), reason="needs g++")
def test_nothing_to_copy_is_a_wait(monkeypatch) -> None:
    monkeypatch.setattr(CudaKernel, "__call__", emulator.launch)
    nothing = torch.empty(0, 8)
    replay_collective(nothing, nothing, torch.tensor([0]))


@pytest.mark.skipif(not emulator.available(), reason="needs g++")
@pytest.mark.parametrize(("ranks", "experts"), [(2, 256), (8, 256), (3, 10)])
def test_ranks_choose_other_experts(monkeypatch, ranks: int, experts: int) -> None:
    monkeypatch.setattr(CudaKernel, "__call__", emulator.launch)
    indices = torch.randint(0, experts, (37, 9))
    indices[:, -1] = experts  # the shared one
    indices[5] = -1  # padding
    out = torch.zeros(ranks, *indices.shape, dtype=torch.int64)
    replay_choices(indices, out, experts, torch.tensor([0]))
    assert torch.equal(out, turned_choices(indices, ranks, experts))
    assert torch.equal(out[0], indices)
    assert (out[:, 5] == -1).all()
    assert (out[:, [0, 36], -1] == experts).all()
    if experts % ranks == 0:  # each rank's experts get what one rank chose of all
        own = (out[:, :5, :8] < experts // ranks).sum()
        assert own == indices[:5, :8].numel()


@pytest.mark.skipif(not emulator.available(), reason="needs g++")
@pytest.mark.parametrize("experts", [0, 256])
def test_operands_that_travel_together(monkeypatch, experts: int) -> None:
    """Operands have any number of bytes; choices of experts are others on other ranks."""
    monkeypatch.setattr(CudaKernel, "__call__", emulator.launch)
    indices = torch.randint(-1, 257, (5, 3))
    xs = [torch.randn(5, 7).bfloat16(), torch.rand(5, 1), indices]
    outs = [torch.zeros(4, *x.shape, dtype=x.dtype) for x in xs]
    replay_many(xs, outs, 4, experts, torch.tensor([0]))
    for x, out in zip(xs[:2], outs, strict=False):
        assert all(torch.equal(part, x) for part in out)
    copied = indices.expand(4, -1, -1)
    assert torch.equal(outs[2], turned_choices(indices, 4, experts) if experts else copied)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("name", ["replay_collective", "replay_collective_many"])
def test_it_waits_by_the_clock(arch: str, name: str) -> None:
    binary = inspect(name, build(f"{name}.cu", arch=arch))
    assert "SR_GLOBALTIMERLO" in binary.sass
    assert binary.local_bytes == 0


@pytest.mark.gpu
def test_a_captured_call_takes_the_time_that_was_set_last() -> None:
    def milliseconds(microseconds: float) -> float:
        wait.fill_(round(microseconds * 1e3))
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)

    x = torch.randn(4, 7168, device="cuda").bfloat16()
    out, wait = torch.empty_like(x), torch.zeros(1, dtype=torch.int64, device="cuda")
    replay_collective(x, out, wait)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            replay_collective(x, out, wait)
    out.zero_()
    milliseconds(0.0)
    assert torch.equal(out, x)
    assert milliseconds(1000.0) >= 10.0
    assert milliseconds(0.0) < 10.0
