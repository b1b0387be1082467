"""Time of short GPU work, launch gaps and the host excluded: replays of CUDA graphs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dsa_compile.measure.case import Call
from dsa_compile.measure.graph_clock import QueuedClock, Work, call_us


def graph_median(calls: Sequence[Call], replays: int = 30) -> float:
    """Median microseconds of one call.

    The calls are captured in turn, as often as :mod:`~dsa_compile.measure.graph_clock` finds enough,
    and the graph is replayed between two events.

    Args:
        calls: work on the current stream, allocating from torch's pools only.
        replays: timed replays, after three that are not.

    Raises:
        RuntimeError: the host cannot queue a replay within seconds.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    return call_us(_capture(calls), len(calls), QueuedClock(_event_us), replays)


def _capture(calls: Sequence[Call]) -> Callable[[int], Work]:
    """Captures graphs of so many rounds of all calls."""

    def capture(rounds: int) -> Work:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(rounds):
                for call in calls:
                    call()
        return graph.replay

    return capture


def _event_us(work: Work, wait: int) -> float | None:
    """Microseconds of work queued behind a kernel that waits; None if the wait ended too soon."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(wait)
    start.record()
    work()
    end.record()
    late = start.query()
    end.synchronize()
    milliseconds: float = start.elapsed_time(end)
    return None if late else milliseconds * 1e3


@dataclass(frozen=True)
class Ceilings:
    """Ceilings of the machine, measured with the simplest work.

    Args:
        bytes_per_us: the most of a kernel that copies a large tensor, reads plus writes, and of one
            that only reads it.
        flops_per_us: by type of a large matrix product.
    """

    bytes_per_us: float
    flops_per_us: dict[str, float]

    def limit_us(self, moved: float, flops: float, math: str) -> float:
        """Time below which no implementation can be."""
        return max(moved / self.bytes_per_us, flops / self.flops_per_us[math])


def measure_ceilings() -> Ceilings:
    """Memory bandwidth and matrix rates of the current device; takes about a second."""
    n = 8192
    a, b = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    work = 2.0 * n**3
    rates = {
        "bf16": work / graph_median([lambda: a @ b], 10),
        "fp8": work / graph_median([_fp8_product(a, b)], 10),
    }
    return Ceilings(memory_bytes_per_us(1 << 30), rates)


def _fp8_product(a: Tensor, b: Tensor) -> Call:
    one = torch.ones((), device=a.device)
    a8, b8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t()
    return lambda: torch._scaled_mm(a8, b8, one, one, out_dtype=torch.bfloat16, use_fast_accum=True)


def memory_bytes_per_us(size: int) -> float:
    """The most that memory gives: to a kernel that copies ``size`` bytes, or that reads them.

    Kernels that read weights and write little are faster than a copy; their floor is the latter.

    Args:
        size: a multiple of 128 KB.
    """
    return max(_copy_bytes_per_us(size), _read_bytes_per_us(size))


def _read_bytes_per_us(size: int) -> float:
    from dsa_compile.measure.stream import TILE, TILES, sum_tiles

    numbers = size // 4
    source = torch.randint(1 << 30, (numbers,), dtype=torch.int32, device="cuda")
    sums = torch.empty(numbers // (TILE * TILES), dtype=torch.int32, device="cuda")
    return float(size) / graph_median([lambda: sum_tiles(source, sums)], 10)


def _copy_bytes_per_us(size: int) -> float:
    # A kernel: a captured copy_ is a memcpy node, which reached two thirds of this on an H200.
    source = torch.randn(size // 4, device="cuda")
    target = torch.empty_like(source)
    return 2.0 * size / graph_median([lambda: torch.neg(source, out=target)], 10)
