"""All-reduces through memory that ranks share: on emulated ranks, and as compiled."""

import multiprocessing

import pytest
import torch
from torch import Tensor

pytest.importorskip("cuda.bindings")

from dsa_compile.kernels.cuda.all_reduce_norm import (
    all_reduce_add_rms_norm_quantize,
    all_reduce_norm_kernel,
    blocks_of_a_row,
    summed_norm,
)
from dsa_compile.kernels.cuda.compiler import build
from dsa_compile.kernels.cuda.device import rehearse
from dsa_compile.kernels.cuda.launch import CudaKernel
from dsa_compile.kernels.cuda.norm_quantize import threads_for
from dsa_compile.kernels.cuda.peer_memory import (
    PeerMemory,
    all_reduce_kernel,
    all_reduce_two_shot_kernel,
)
from dsa_compile.ops import REFERENCE
from dsa_compile.ops.collectives import sum_of_ranks
from tests.kernels import emulator
from tests.kernels.compile_only import inspect

EPS = 1e-6
CAPACITY = 3 * 512 * 2


def shared(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.zeros(shape, dtype=dtype).share_memory_()


def run_rank(
    memory: PeerMemory,
    given: list[Tensor],
    results: list[Tensor],
    norms: list[tuple[Tensor, Tensor]],
    normed: list[tuple[Tensor, ...]],
) -> None:
    for call, (x, out) in enumerate(zip(given, results, strict=True)):
        out.copy_(memory.all_reduce(x))
        if x.nbytes % (16 * len(memory.addresses)) == 0:
            assert torch.equal(memory.all_reduce_in_two_shots(x), out)
        if x.shape[-1] >= 256:
            found = summed_norm(memory, x, *norms[call], EPS, True)
            for to, value in zip(normed[call], found, strict=True):
                to.view(torch.uint8).copy_(value.view(torch.uint8))


def differing(got: Tensor, want: Tensor) -> float:
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    return (got.view(torch.uint8) != want.view(torch.uint8)).float().mean().item()


def outputs(rows: int, width: int) -> tuple[Tensor, ...]:
    """Normed, values, scales and sum."""
    return (
        shared(rows, width, dtype=torch.bfloat16),
        shared(rows, width, dtype=torch.float8_e4m3fn),
        shared(rows, -(-width // 128), dtype=torch.float32),
        shared(rows, width, dtype=torch.bfloat16),
    )


@pytest.mark.slow
@pytest.mark.skipif(not emulator.available(), reason="needs g++")
@pytest.mark.parametrize(
    ("ranks", "width"),
    [(2, 512), (3, 512), (2, 256)],  # two blocks have a row, and one
)
def test_every_rank_gets_the_sum_in_the_order_of_ranks(monkeypatch, ranks: int, width: int) -> None:
    """Processes stand for GPUs; calls of several sizes, one after the other."""
    torch.manual_seed(0)
    shapes = [(1, width), (3, width), (2, 8), (3, width), (1, 8), (1, width)]
    monkeypatch.setattr(CudaKernel, "__call__", emulator.launch)
    for kernel in (
        all_reduce_kernel(ranks),
        all_reduce_two_shot_kernel(ranks),
        all_reduce_norm_kernel(ranks, width, torch.bfloat16),
    ):  # built once, by the parent
        emulator.build(kernel)
    size = PeerMemory.nbytes(ranks, CAPACITY)
    buffers = [shared(size, dtype=torch.uint8) for _ in range(ranks)]
    addresses = tuple(buffer.data_ptr() for buffer in buffers)
    given = [[torch.randn(shape).bfloat16() for shape in shapes] for _ in range(ranks)]
    results = [[shared(*shape, dtype=torch.bfloat16) for shape in shapes] for _ in range(ranks)]
    norms = [(torch.randn(shape).bfloat16(), torch.randn(shape[-1]).bfloat16()) for shape in shapes]
    normed = [[outputs(*shape) for shape in shapes] for _ in range(ranks)]
    fork = multiprocessing.get_context("fork")
    processes = []
    for rank in range(ranks):
        state = shared(2, dtype=torch.int32)
        memory = PeerMemory(rank, addresses, state, CAPACITY, 3600.0)
        arguments = (memory, given[rank], results[rank], norms, normed[rank])
        processes.append(fork.Process(target=run_rank, args=arguments))
        processes[-1].start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    for call, parts in enumerate(zip(*given, strict=True)):
        want = sum_of_ranks(parts)
        for rank in range(ranks):
            assert torch.equal(results[rank][call], want), (call, rank)
        if want.shape[-1] != width:
            continue
        reference = REFERENCE[torch.ops.dsa.add_rms_norm_quantize.default]
        for got, value in zip(
            normed[0][call], reference(want, *norms[call], EPS, True), strict=True
        ):
            assert differing(got, value) <= 0.005  # a norm's sum has another order
        for rank in range(1, ranks):
            for got, value in zip(normed[rank][call], normed[0][call], strict=True):
                assert differing(got, value) == 0


def test_what_is_summed_here() -> None:
    memory = PeerMemory(0, (1, 2), torch.zeros(2, dtype=torch.int32), CAPACITY, 1.0)
    assert memory.takes(torch.empty(3, 512, dtype=torch.bfloat16))
    assert not memory.takes(torch.empty(4, 512, dtype=torch.bfloat16))
    assert not memory.takes(torch.empty(0, 512, dtype=torch.bfloat16))
    assert not memory.takes(torch.empty(1, 4, dtype=torch.bfloat16))
    assert not memory.takes(torch.empty(1, 512))


@pytest.mark.parametrize(("ranks", "rows"), [(2, 73), (4, 96), (8, 96)])
def test_two_shots_sum_more_rows_than_a_rank_may_have_for_another_one(
    ranks: int, rows: int
) -> None:
    memory = PeerMemory(0, tuple(range(ranks)), torch.zeros(2, dtype=torch.int32), 1 << 20, 1.0)
    assert memory.takes(torch.empty(rows, 7168, dtype=torch.bfloat16))
    assert not memory.takes(torch.empty(rows + 1, 7168, dtype=torch.bfloat16))


def test_shares_are_whole_chunks() -> None:
    memory = PeerMemory(0, (0, 1, 2), torch.zeros(2, dtype=torch.int32), 1 << 20, 1.0)
    assert memory.takes(torch.empty(64, 7168 - 16, dtype=torch.bfloat16))
    assert not memory.takes(torch.empty(64, 7168, dtype=torch.bfloat16))
    assert memory.takes(torch.empty(1, 7168, dtype=torch.bfloat16))  # in one shot


@pytest.mark.parametrize(
    ("width", "blocks", "threads"), [(7168, 7, 128), (6144, 8, 96), (256, 1, 32)]
)
def test_a_cluster_has_a_row(width: int, blocks: int, threads: int) -> None:
    assert blocks_of_a_row(width) == blocks
    assert threads_for(width // blocks, 1) == threads


@pytest.mark.parametrize(("rows", "kernels"), [(1, {"all_reduce_norm"}), (64, set())])
def test_few_rows_are_normed_with_their_sum(rows: int, kernels: set[str]) -> None:
    x = torch.empty(rows, 7168, dtype=torch.bfloat16, device="meta")
    weight = torch.empty(7168, dtype=torch.bfloat16, device="meta")
    with rehearse("sm_90a") as noted:
        all_reduce_add_rms_norm_quantize(x, "tp", 4, x, weight, EPS, True)
    assert {kernel.name for kernel in noted.kernels} == kernels | {"norm_quantize"}


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("make", [all_reduce_kernel, all_reduce_two_shot_kernel])
def test_lines_are_16_bytes_with_their_flags(make, arch: str, ranks: int) -> None:
    kernel = make(ranks)
    binary = inspect(kernel.name, build(kernel.source, arch=arch, defines=kernel.defines))
    assert "STG.E.128.STRONG.SYS" in binary.sass
    assert "LDG.E.128.STRONG.SYS" in binary.sass
    assert "STL" not in binary.sass  # nothing is spilled


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_the_norm_of_a_sum_keeps_a_row_in_registers(arch: str) -> None:
    kernel = all_reduce_norm_kernel(8, 7168, torch.bfloat16)
    binary = inspect("all_reduce_norm", build(kernel.source, arch=arch, defines=kernel.defines))
    assert "LDG.E.128.STRONG.SYS" in binary.sass
    assert binary.local_bytes == 0
