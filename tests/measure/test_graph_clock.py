"""Timing by graphs on a stand-in for GPU and host: a slow host lengthens no result."""

import time
from dataclasses import dataclass, field

import pytest
import torch

from dsa_compile.measure.graph_clock import QueuedClock, call_us, steady_rounds
from dsa_compile.measure.timing import graph_median

CYCLES_PER_US = 1980.0


@dataclass
class Machine:
    """A GPU whose graphs start up in 4 µs, and a host that queues a replay in ``host_us``.

    Attributes:
        us: of a call on the GPU.
        host_us: from the first event to the last, as the host queues them.
        graphs: rounds of each graph captured.
    """

    us: float
    host_us: float
    calls: int = 1
    start_up_us: float = 4.0
    graphs: list[int] = field(default_factory=list)
    queued: float = 0.0

    def capture(self, rounds: int):
        self.graphs.append(rounds)

        def replay() -> None:
            self.queued = self.start_up_us + rounds * self.calls * self.us

        return replay

    def attempt(self, work, wait: int) -> float | None:
        """As events on a stream behind a wait: the host shows only where the wait is too short."""
        work()
        return None if wait / CYCLES_PER_US < self.host_us else self.queued

    def time(self, replays: int = 5) -> float:
        return call_us(self.capture, self.calls, QueuedClock(self.attempt), replays)


@pytest.mark.parametrize("host_us", [1.0, 30.0, 600.0, 50_000.0])
@pytest.mark.parametrize("us", [0.9, 7.3, 120.0, 3_000.0])
@pytest.mark.parametrize("calls", [1, 12])
def test_the_time_of_a_call_is_the_gpus(us: float, host_us: float, calls: int) -> None:
    machine = Machine(us, host_us, calls)
    assert machine.time() == pytest.approx(us, rel=0.015)
    assert machine.time() == Machine(us, 1.0, calls).time()


def test_a_host_that_does_not_get_on_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="the host takes seconds to queue one replay"):
        Machine(7.3, host_us=1e9).time()


def test_the_wait_grows_until_the_host_is_ahead_and_stays() -> None:
    waits: list[int] = []
    machine = Machine(7.3, host_us=1_000.0)

    def attempt(work, wait: int) -> float | None:
        waits.append(wait)
        return machine.attempt(work, wait)

    clock = QueuedClock(attempt)
    replay = machine.capture(10)
    assert clock.median_us(replay, 3) == 77.0
    assert clock.median_us(replay, 3) == 77.0
    growing, last = waits[:-6], waits[-6:]
    assert growing == sorted(set(growing))
    assert growing
    assert set(last) == {2 * growing[-1]}


def test_long_calls_are_captured_few_times() -> None:
    machine = Machine(3_000.0, 1.0)
    machine.time()
    assert max(machine.graphs) <= 2


def test_graphs_are_limited() -> None:
    machine = Machine(0.001, 1.0, calls=10)
    machine.time()
    assert max(machine.graphs) * 10 <= 1024
    assert steady_rounds(lambda rounds: 0.0, 7) <= 7


def test_a_first_graph_that_ran_slowly_does_not_leave_the_next_too_short() -> None:
    """Clocks that have yet to rise, or another process on the GPU."""
    for first in (400.0, 2_000.0, 50_000.0):
        times = [first]

        def graph_us(rounds: int, times=times) -> float:
            return times.pop() if times else 4.0 + 7.3 * rounds

        assert 4.0 + 7.3 * steady_rounds(graph_us, 1024) >= 400.0


def test_a_graph_grows_while_a_call_takes_less_in_a_longer_one() -> None:
    """A start-up of 100 µs shows in graphs of 400 µs."""
    machine = Machine(7.3, 1.0, start_up_us=100.0)
    assert machine.time() == pytest.approx(7.3, rel=0.05)


@pytest.mark.gpu
def test_a_slow_host_does_not_lengthen_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(1 << 20, device="cuda")
    quick = graph_median([lambda: torch.neg(x)])
    replay = torch.cuda.CUDAGraph.replay

    def slow(self: torch.cuda.CUDAGraph) -> None:
        time.sleep(0.002)
        replay(self)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", slow)
    assert graph_median([lambda: torch.neg(x)]) < 2 * quick
