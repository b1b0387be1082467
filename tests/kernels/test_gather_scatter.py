"""All-gathers and reduce-scatters through memory that ranks share: emulated, and as compiled."""

import multiprocessing
import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

pytest.importorskip("cuda.bindings")

from dsa_compile.facts.layout import DP, TP, Layout
from dsa_compile.kernels.cuda.compiler import build
from dsa_compile.kernels.cuda.launch import CudaKernel
from dsa_compile.kernels.cuda.peer_memory import (
    PeerMemory,
    all_gather_kernel,
    all_reduce_kernel,
    peer_bytes,
    peer_memories,
    reduce_scatter_kernel,
)
from dsa_compile.ops.collectives import sum_of_ranks
from tests.kernels import emulator
from tests.kernels.compile_only import inspect

CAPACITY = 8192
DTYPES = (torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.int64)
Call = tuple[str, tuple[Tensor, ...]]


def shared(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.zeros(shape, dtype=dtype).share_memory_()


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(-1).view(torch.uint8)


def same_bits(got: Tensor, want: Tensor) -> bool:
    return torch.equal(bits(got), bits(want))


def anything(rng: random.Random, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Bytes of any value, sums of which would be NaN: nothing may compute with them."""
    size = torch.empty(shape, dtype=dtype).nbytes
    found = torch.tensor([rng.randrange(256) for _ in range(size)], dtype=torch.uint8)
    return found.view(dtype).view(*shape)


def random_call(rng: random.Random, ranks: int) -> list[Call]:
    """One call, with the operands of each rank."""
    op = rng.choice(["reduce", "gather", "gather", "scatter"])
    if op != "gather":
        rows = rng.randint(1, 3) * (ranks if op == "scatter" else 1)
        shape = (rows, 8 * rng.randint(1, 40))
        return [(op, (torch.randn(shape).bfloat16(),)) for _ in range(ranks)]
    sizes = [(rng.randint(0, 3), rng.randint(1, 300)) for _ in range(rng.randint(1, 3))]
    operands = [((1, rng.randint(1, 200)), rng.choice(DTYPES))]  # one that is not empty
    operands += [(size, rng.choice(DTYPES)) for size in sizes]
    rng.shuffle(operands)
    while sum(-(-anything(rng, *each).nbytes // 16) * 16 for each in operands) > CAPACITY:
        operands.pop()
    return [(op, tuple(anything(rng, *each) for each in operands)) for _ in range(ranks)]


def build_for(ranks: int) -> None:
    """Once, by the parent of all ranks."""
    for make in (all_reduce_kernel, all_gather_kernel, reduce_scatter_kernel):
        kernel = make(ranks)
        emulator.build(kernel)


def run_all(ranks: Sequence[tuple[list[PeerMemory], list[Call], list[list[Tensor]]]]) -> None:
    """A process for each rank."""
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=run_rank, args=arguments) for arguments in ranks]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0


def run_rank(memories: list[PeerMemory], calls: list[Call], results: list[list[Tensor]]) -> None:
    for memory, (op, operands), wanted in zip(memories, calls, results, strict=True):
        if op == "gather":
            assert memory.gathers(operands)
            found = memory.all_gather(operands)
        elif op == "scatter":
            assert memory.scatters(*operands)
            found = [memory.reduce_scatter(*operands)]
        else:
            found = [memory.all_reduce(*operands)]
        for to, value in zip(wanted, found, strict=True):
            assert (to.shape, to.dtype) == (value.shape, value.dtype)
            bits(to).copy_(bits(value))


def wanted(calls: Sequence[Call], rank: int) -> list[Tensor]:
    """Right results of a call on a rank, from the operands of all."""
    operands = [each for _, each in calls]
    if calls[0][0] == "gather":
        return [torch.stack([bits(x) for x in xs]) for xs in zip(*operands, strict=True)]
    total = sum_of_ranks([x for (x,) in operands])
    return [total.chunk(len(calls))[rank] if calls[0][0] == "scatter" else total]


def results_like(calls: Sequence[Call]) -> list[Tensor]:
    op, operands = calls[0]
    ranks = len(calls)
    if op == "gather":
        return [shared(ranks, *x.shape, dtype=x.dtype) for x in operands]
    (x,) = operands
    rows = x.shape[0] // (ranks if op == "scatter" else 1)
    return [shared(rows, *x.shape[1:], dtype=x.dtype)]


@pytest.mark.slow
@pytest.mark.skipif(not emulator.available(), reason="needs g++")
@pytest.mark.parametrize(("ranks", "count"), [(2, 24), (3, 12), (8, 5)])
def test_calls_of_all_kinds_follow_one_another(monkeypatch, ranks: int, count: int) -> None:
    """Processes stand for GPUs, one of which may run ahead; blocks run one after the other."""
    torch.manual_seed(ranks)
    rng = random.Random(ranks)
    monkeypatch.setattr(CudaKernel, "__call__", emulator.launch)
    build_for(ranks)
    buffers = [shared(PeerMemory.nbytes(ranks, CAPACITY), dtype=torch.uint8) for _ in range(ranks)]
    addresses = tuple(buffer.data_ptr() for buffer in buffers)
    calls = [random_call(rng, ranks) for _ in range(count)]
    assert len({call[0][0] for call in calls}) > 1
    results = [[results_like(call) for call in calls] for _ in range(ranks)]
    memories = [
        PeerMemory(rank, addresses, shared(2, dtype=torch.int32), CAPACITY, 3600.0)
        for rank in range(ranks)
    ]
    run_all(
        [
            ([memories[rank]] * count, [call[rank] for call in calls], results[rank])
            for rank in range(ranks)
        ]
    )
    for number, call in enumerate(calls):
        for rank in range(ranks):
            want = wanted(call, rank)
            assert all(map(same_bits, results[rank][number], want)), (number, rank, call[0][0])


@pytest.mark.skipif(not emulator.available(), reason="needs g++")
def test_ranks_of_a_lane_and_lanes_count_their_calls_by_themselves(monkeypatch) -> None:
    """Two lanes of two ranks, each of which meets its lane and its like in the other one."""
    layout, count, rng = Layout(tp=2, dp=2), 10, random.Random(0)
    monkeypatch.setattr(CudaKernel, "__call__", emulator.launch)
    build_for(2)
    groups = [{axis: layout.group(axis, rank) for axis in (TP, DP)} for rank in range(4)]
    buffers = [shared(peer_bytes(groups[0], CAPACITY), dtype=torch.uint8) for _ in range(4)]
    addresses = [buffer.data_ptr() for buffer in buffers]
    axes = [rng.choice((TP, DP)) for _ in range(count)]
    calls: list[dict[int, Call]] = [{} for _ in range(count)]
    for call in calls:
        op, xs = random_call(rng, 2)[0]
        for rank in range(4):
            fresh = (anything(rng, x.shape, x.dtype) if op == "gather" else x + rank for x in xs)
            call[rank] = (op, tuple(fresh))
    results = [[results_like([call[rank]] * 2) for call in calls] for rank in range(4)]
    run_all(
        [
            (
                [
                    peer_memories(rank, groups[rank], addresses, states, CAPACITY, 3600.0)[axis]
                    for axis in axes
                ],
                [call[rank] for call in calls],
                results[rank],
            )
            for rank in range(4)
            for states in [shared(2, 2, dtype=torch.int32)]
        ]
    )
    for number, (axis, call) in enumerate(zip(axes, calls, strict=True)):
        for rank in range(4):
            met = [call[member] for member in groups[rank][axis]]
            want = wanted(met, layout.numbers(rank)[axis])
            assert all(map(same_bits, results[rank][number], want)), (number, rank, call[rank][0])


def test_operands_need_not_lie_where_16_bytes_are_loaded_at_once(monkeypatch) -> None:
    """A view that begins in between, and results of an odd number of bytes for each rank."""
    if not emulator.available():
        pytest.skip("needs g++")
    monkeypatch.setattr(CudaKernel, "__call__", emulator.launch)
    buffer = torch.zeros(PeerMemory.nbytes(1, CAPACITY), dtype=torch.uint8)
    state = torch.zeros(2, dtype=torch.int32)
    memory = PeerMemory(0, (buffer.data_ptr(),), state, CAPACITY, 1.0)
    x = torch.arange(200, dtype=torch.uint8)[3:150]
    y = torch.randn(64).bfloat16()[4:60].view(7, 8)
    (gathered,) = memory.all_gather((x,))
    assert torch.equal(gathered, x[None])
    assert torch.equal(memory.reduce_scatter(y), y)
    assert state.tolist() == [2, 0]  # calls, and blocks that have left the present one


def test_what_is_gathered_and_scattered_here() -> None:
    memory = PeerMemory(0, (1, 2), torch.zeros(2, dtype=torch.int32), 64, 1.0)
    some, none = torch.empty(3, 5, dtype=torch.uint8), torch.empty(0, 5)
    assert memory.gathers((some, some, some, some))
    assert memory.gathers((some, none))
    assert not memory.gathers((some,) * 5)
    assert not memory.gathers((none,))
    assert not memory.gathers((torch.empty(33, dtype=torch.bfloat16), none))  # five chunks
    assert memory.scatters(torch.empty(2, 32, dtype=torch.bfloat16))
    assert not memory.scatters(torch.empty(2, 40, dtype=torch.bfloat16))  # beyond a share
    assert not memory.scatters(torch.empty(1, 16, dtype=torch.bfloat16))  # rows of half a rank
    assert not memory.scatters(torch.empty(2, 4, dtype=torch.bfloat16))  # half a chunk
    assert not memory.scatters(torch.empty(2, 8))
    assert not memory.scatters(torch.empty(0, 8, dtype=torch.bfloat16))


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("name", ["all_gather", "reduce_scatter"])
def test_lines_are_stored_and_loaded_whole_without_a_spill(arch: str, ranks: int, name) -> None:
    binary = inspect(name, build(f"{name}.cu", arch=arch, defines={"RANKS": ranks}))
    assert "STG.E.128.STRONG.SYS" in binary.sass
    assert "LDG.E.128.STRONG.SYS" in binary.sass
    assert binary.local_bytes == 0
    assert binary.registers <= 128  # two blocks of 256 threads
