"""Times of collectives between the GPUs of a machine, a process each.

Every rank captures the same number of calls in a CUDA graph and replays it as often as the others.
The figure is the median over replays of the slowest rank's time. Each way is compared before it is
timed: with the sum of all ranks' operands, this rank's rows of it, or the operands themselves.
"""

import functools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor
from torch._C._distributed_c10d import TCPStore
from torch.distributed import _symmetric_memory as symmetric_memory

from dsa_compile.kernels.cuda.all_reduce_norm import summed_norm
from dsa_compile.kernels.cuda.norm_quantize import add_rms_norm_quantize
from dsa_compile.kernels.cuda.peer_memory import PeerMemory
from dsa_compile.kernels.cuda.shared_peer_memory import shared_peer_memories

WIDTH = 7168
_CALLS, _REPLAYS, _WARM_UPS = 40, 20, 3
_PATIENCE = 20.0
Call = Callable[[], Tensor]


@dataclass(frozen=True)
class Timing:
    """One way to run one collective.

    Attributes:
        op: the collective.
        rows: of each rank's operand, bf16, 7,168 wide.
        ranks: that meet.
        provider: whose.
        us: median microseconds; None where it was not timed.
        problem: why it was not.
    """

    op: str
    rows: int
    ranks: int
    provider: str
    us: float | None
    problem: str = ""


def measure(ranks: int, rows: Sequence[int], norm: bool = False) -> list[Timing]:
    """Time the collectives over the first GPUs of this machine.

    Args:
        ranks: how many GPUs.
        rows: of operands.
        norm: also time all-reduces with the addition, norm and quantisation that follow.

    Raises:
        RuntimeError: a process failed.
    """
    store = TCPStore("127.0.0.1", 0, ranks, is_master=True, wait_for_workers=False)
    processes: Any = torch.multiprocessing  # whose declarations lack what follows
    context = processes.get_context("spawn")
    results: Any = context.SimpleQueue()
    processes.spawn(_run, (ranks, store.port, tuple(rows), norm, results), nprocs=ranks)
    found: list[Timing] = [Timing(**row) for row in results.get()]
    return found


def latency_table(timings: Sequence[Timing], machine: Mapping[str, str]) -> dict[str, Any]:
    """Timings as the table of one machine that engines replay.

    Args:
        timings: those without a figure are left out.
        machine: the GPU, the day and versions by name, of which ``gpu`` and ``date``.
    """
    ranks = max((timing.ranks for timing in timings), default=0)
    entries = [
        {
            "op": timing.op,
            "provider": timing.provider,
            "ranks": timing.ranks,
            "bytes": timing.rows * WIDTH * 2,
            "us": timing.us,
        }
        for timing in timings
        if timing.us is not None
    ]
    versions = {name: value for name, value in machine.items() if name not in ("gpu", "date")}
    if dist.is_nccl_available():
        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    found = {
        "machine": f"{ranks} x {machine['gpu']} of one host",
        "date": machine["date"],
        "versions": versions,
        "note": "bf16, 7,168 wide; medians of calls in a CUDA graph, of the slowest rank",
        "entries": entries,
    }
    return {"machines": [found]}


def _run(rank: int, ranks: int, port: int, rows: Sequence[int], norm: bool, results: Any) -> None:
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    store = TCPStore("127.0.0.1", port, ranks, is_master=False)
    dist.init_process_group(
        "nccl", store=store, rank=rank, world_size=ranks, device_id=device,
        timeout=timedelta(seconds=_PATIENCE),
    )  # fmt: skip
    torch.manual_seed(rank)
    groups = {"all": range(ranks)}
    memory = shared_peer_memories(store, rank, ranks, groups, _PATIENCE)["all"]
    found = []
    for count in rows:
        x = torch.randn(count, WIDTH, device=device).bfloat16()
        candidates = _candidates(x, ranks, memory)
        if norm:
            candidates |= _with_norm(x, candidates["all_reduce"]["nccl"], memory)
        for op, calls in candidates.items():
            for provider, call in calls.items():
                found.append(_measured(op, count, ranks, provider, call, x))
    dist.barrier()
    torch.cuda.synchronize()
    if rank == 0:
        results.put([asdict(timing) for timing in found])
    dist.destroy_process_group()


def _candidates(x: Tensor, ranks: int, memory: PeerMemory) -> dict[str, dict[str, Call]]:
    def nccl_reduce() -> Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return total

    def nccl_gather() -> Tensor:
        parts = torch.empty((ranks, *x.shape), dtype=x.dtype, device=x.device)
        dist.all_gather_into_tensor(parts, x)
        return parts

    def nccl_scatter() -> Tensor:
        own = torch.empty((x.shape[0] // ranks, WIDTH), dtype=x.dtype, device=x.device)
        dist.reduce_scatter_tensor(own, x)
        return own

    reduces: dict[str, Call] = {"nccl": nccl_reduce}
    if memory.takes(x):
        reduces["symmetric"] = lambda: memory.all_reduce(x)
    if memory.takes_in_one_shot(x):
        reduces["symmetric one-shot"] = lambda: memory.all_reduce_in_one_shot(x)
    if ranks > 2 and memory.takes_in_two_shots(x):
        reduces["symmetric two-shot"] = lambda: memory.all_reduce_in_two_shots(x)
    buffer = symmetric_memory.empty(x.numel(), dtype=x.dtype, device=x.device)
    symmetric_memory.rendezvous(buffer, dist.group.WORLD)  # type: ignore[arg-type]
    name = dist.group.WORLD.group_name  # type: ignore[union-attr]

    def torch_one_shot(shots: str) -> Tensor:
        buffer.copy_(x.view(-1))
        op = getattr(torch.ops.symm_mem, f"{shots}_shot_all_reduce{'_' if shots == 'two' else ''}")
        total: Tensor = op(buffer, "sum", name)
        return total.view_as(x)

    for shots in ("one", "two"):
        reduces[f"torch {shots}-shot"] = functools.partial(torch_one_shot, shots)
    gathers: dict[str, Call] = {"nccl": nccl_gather}
    if memory.gathers((x,)):
        gathers["symmetric"] = lambda: memory.all_gather((x,))[0]
    found = {"all_reduce": reduces, "all_gather": gathers}
    if x.shape[0] % ranks == 0:
        scatters = found["reduce_scatter"] = {"nccl": nccl_scatter}
        if memory.scatters(x):
            scatters["symmetric"] = lambda: memory.reduce_scatter(x)
    return found


def _with_norm(x: Tensor, all_reduce: Call, memory: PeerMemory) -> dict[str, dict[str, Call]]:
    residual, weight = torch.randn_like(x), torch.ones(WIDTH, dtype=x.dtype, device=x.device)
    operands = (residual, weight, 1e-6, True)
    calls: dict[str, Call] = {"nccl": lambda: add_rms_norm_quantize(all_reduce(), *operands)[-1]}
    if memory.norms(x):
        calls["symmetric"] = lambda: summed_norm(memory, x, *operands)[-1]
    return {"all_reduce_add_rms_norm_quantize": calls}


def _measured(op: str, rows: int, ranks: int, provider: str, call: Call, x: Tensor) -> Timing:
    wanted = _WANTED.get(op)
    if wanted and (problem := _problem(wanted, call, x, ranks)):
        return Timing(op, rows, ranks, provider, None, problem)
    ours = provider.startswith("symmetric")
    if op == "all_reduce" and ours and not _same_bits(call(), ranks):
        return Timing(op, rows, ranks, provider, None, "ranks have other bits")
    return Timing(op, rows, ranks, provider, _graph_us(call))


def _total(parts: Tensor) -> Tensor:
    return parts.sum(0)


def _own_rows(parts: Tensor) -> Tensor:
    return parts.sum(0).chunk(len(parts))[dist.get_rank()]


_WANTED: dict[str, Callable[[Tensor], Tensor]] = {
    "all_reduce": _total,
    "all_gather": torch.Tensor.clone,
    "reduce_scatter": _own_rows,
}
"""Right results of collectives on a rank, from all ranks' operands in fp64, one after another."""


def _problem(wanted: Callable[[Tensor], Tensor], call: Call, x: Tensor, ranks: int) -> str:
    """Problem of a result, in the same words on all ranks; empty if it is right."""
    parts = [torch.empty_like(x) for _ in range(ranks)]
    dist.all_gather(parts, x)
    every = torch.stack(parts).double()
    want, terms = wanted(every), wanted(every.abs()).clamp_min(1e-6)
    worst = ((call().double() - want).abs() / terms).max()
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    sums = want.shape != every.shape  # what is gathered is not rounded
    if worst > (ranks * 2**-8 if sums else 0):
        return f"differs by {float(worst):.1e} of the terms"
    return ""


def _same_bits(got: Tensor, ranks: int) -> bool:
    every = [torch.empty_like(got) for _ in range(ranks)]
    dist.all_gather(every, got.contiguous())
    return all(torch.equal(every[0], other) for other in every[1:])


def _graph_us(call: Call) -> float:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(_CALLS):
            call()
    times = []
    for replay in range(_WARM_UPS + _REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        dist.barrier()
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        if replay >= _WARM_UPS:
            times.append(start.elapsed_time(end) * 1e3 / _CALLS)
    slowest = torch.tensor(times, device="cuda")
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    del graph
    median: float = statistics.median(slowest.tolist())
    return median
