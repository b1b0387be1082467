"""Ranks as threads of one process: the same steps and messages as of processes, started at once."""

import threading
from collections.abc import Sequence
from multiprocessing import Pipe
from typing import Any

import torch
from torch import Tensor

from dsa_compile.facts.layout import DP, Layout
from dsa_compile.ops.collectives import communicating, sum_of_ranks
from dsa_compile.runtime.execution.model_runner import ModelRunner
from dsa_compile.runtime.ranks.group import RankGroup
from dsa_compile.runtime.ranks.messages import Failed
from dsa_compile.runtime.ranks.processes import RankProcess
from dsa_compile.runtime.ranks.watch import Watch
from dsa_compile.runtime.ranks.worker import follow_steps

TIMEOUT = 60.0


class Exchange:
    """Exchange in which threads that meet leave their operands, for all ranks of a layout."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        groups = {layout.group(axis, rank) for rank in range(layout.world) for axis in ("tp", DP)}
        self._barriers = {members: threading.Barrier(len(members)) for members in groups}
        self._parts: dict[tuple[int, ...], dict[int, Tensor]] = {g: {} for g in groups}

    def swap(self, members: tuple[int, ...], rank: int, x: Tensor) -> list[Tensor]:
        """The operands of all members."""
        barrier, parts = self._barriers[members], self._parts[members]
        parts[rank] = x
        barrier.wait(TIMEOUT)
        found = [parts[member].clone() for member in members]
        barrier.wait(TIMEOUT)
        return found

    def abort(self) -> None:
        """Let nobody wait any more."""
        for barrier in self._barriers.values():
            barrier.abort()


class ThreadCommunicator:
    """A communicator of one of the threads.

    Attributes:
        met: axis, shape and dtype of the operands of every collective so far.
    """

    def __init__(self, exchange: Exchange, rank: int) -> None:
        self._exchange, self._rank = exchange, rank
        self.met: list[tuple[str, tuple[int, ...], torch.dtype]] = []

    def peer_memory(self, axis: str) -> None:
        return None

    def gather(self, x: Tensor, axis: str, ranks: int) -> Tensor:
        layout = self._exchange.layout
        assert layout.along(axis) == ranks
        self.met.append((axis, tuple(x.shape), x.dtype))
        # Raises where operands differ in shape, which gloo need not notice.
        return torch.stack(self._exchange.swap(layout.group(axis, self._rank), self._rank, x))

    def gather_many(self, xs: Sequence[Tensor], axis: str, ranks: int) -> list[Tensor]:
        return [self.gather(x, axis, ranks) for x in xs]

    def all_reduce(self, x: Tensor, axis: str, ranks: int) -> Tensor:
        return sum_of_ranks(self.gather(x, axis, ranks).unbind())

    def reduce_scatter(self, x: Tensor, axis: str, ranks: int) -> Tensor:
        own = self._exchange.layout.numbers(self._rank)[axis]
        return sum_of_ranks([part.chunk(ranks)[own] for part in self.gather(x, axis, ranks)])

    def abort(self) -> None:
        self._exchange.abort()

    def close(self) -> None:
        """Nothing to free."""


class RankThread(threading.Thread):
    """Stands for the process of a rank."""

    pid = 0

    def __init__(self, runner: ModelRunner, communicator: Any, rank: int, layout: Layout) -> None:
        super().__init__(name=f"rank {rank}", daemon=True)
        self._given = (runner, layout, rank)
        self._communicator = communicator
        ours, self._theirs = Pipe()
        self.process = RankProcess(rank, self, ours)
        self.start()

    def run(self) -> None:
        try:
            with communicating(self._communicator):
                follow_steps(*self._given, self._theirs, TIMEOUT)
        except (EOFError, ConnectionError):
            pass
        except Exception as error:
            self._theirs.send(Failed(f"{type(error).__name__}: {error}"))
            self._communicator.abort()

    def poll(self) -> int | None:
        return None if self.is_alive() else 0

    def wait(self, timeout: float | None = None) -> int:
        self.join(timeout)
        return 0

    def kill(self) -> None:
        self._communicator.abort()


def group_of_threads(
    runners: Sequence[ModelRunner], layout: Layout, max_num_seqs: int
) -> RankGroup:
    """A group whose first rank is the thread that calls it.

    Args:
        runners: of all ranks, each with its weights.
        layout: that they were compiled for.
        max_num_seqs: most requests of a lane.
    """
    exchange = Exchange(layout)
    first, *rest = (ThreadCommunicator(exchange, rank) for rank in range(layout.world))
    others = [
        RankThread(runner, communicator, rank, layout).process
        for rank, (runner, communicator) in enumerate(zip(runners[1:], rest, strict=True), 1)
    ]
    watch = Watch(others, exchange.abort)
    return RankGroup(runners[0], layout, others, first, watch, TIMEOUT, max_num_seqs)
