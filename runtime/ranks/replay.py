"""One rank of several, without the others: what collectives would take is measured time, replayed.

The rank loads its own part and runs its own kernels. A collective makes a result of the right shape
from the rank's own operand, and on a GPU takes as long as the table of latencies says. What such an
engine generates means nothing, and its times are projections.
"""

import logging
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from dsa_compile.errors import UserError
from dsa_compile.facts.layout import ONE_RANK, Layout
from dsa_compile.kernels.cuda.norm_quantize import add_rms_norm_quantize
from dsa_compile.kernels.cuda.peer_memory import MOST_OPERANDS
from dsa_compile.kernels.cuda.replay_collective import (
    CHUNK,
    REPLAY,
    REPLAY_CHOICES,
    REPLAY_MANY,
    ReplayedMemory,
    replay_choices,
    replay_collective,
    replay_many,
    turned_choices,
)
from dsa_compile.ops.collectives import communicating
from dsa_compile.runtime.engine_options import EngineOptions
from dsa_compile.runtime.execution.devices import device_of
from dsa_compile.runtime.execution.model_runner import ModelRunner
from dsa_compile.runtime.loading.load_runner import load_runner
from dsa_compile.runtime.loading.peers import Alone
from dsa_compile.runtime.ranks.group import RankGroup
from dsa_compile.runtime.ranks.latencies import (
    NCCL,
    NORMED,
    Estimate,
    LatencyTable,
    read_latencies,
)
from dsa_compile.runtime.ranks.watch import Watch

_LOG = logging.getLogger(__name__)
_MOST_CALLS = 1 << 16  # of different op and size, in the life of a process
_CALLS, _REPLAYS, _PROBE_US = 40, 20, 20.0
_WIDTH = 7168  # of the rows whose collectives were measured


class ReplayCommunicator:
    """A :class:`~dsa_compile.ops.collectives.Communicator` whose other ranks are not there.

    Args:
        table: how long collectives take.
        device: of the operands.
        experts: that routers choose from; of their gathered numbers, each rank's are others.
    """

    def __init__(self, table: LatencyTable, device: torch.device, experts: int = 0) -> None:
        self._table, self._experts = table, experts
        self._provider, self._scale = NCCL, 1.0
        self._slots: dict[tuple[str, int, int], int] = {}
        self._waits: Tensor | None = None
        self._launch_us = self._norm_us = 0.0
        if device.type == "cuda":
            REPLAY.warm()
            REPLAY_CHOICES.warm()
            REPLAY_MANY.warm()
            self._waits = torch.zeros(_MOST_CALLS, dtype=torch.int64, device=device)
            self._launch_us, self._norm_us = self._measured_launches()
            _LOG.info(
                "a replayed collective takes %.2f us by itself, a norm behind it %.2f",
                self._launch_us,
                self._norm_us,
            )

    @property
    def launch_us(self) -> float:
        """Microseconds that a replayed collective takes of its own; subtracted from each wait."""
        return self._launch_us

    def replay(self, provider: str, scale: float = 1.0) -> None:
        """Take another provider's latencies from now on, in captured graphs too.

        Args:
            provider: of the table; what it was not measured for is NCCL's.
            scale: times the latencies; 0 leaves the launches alone.

        Raises:
            UserError: the table has no such provider.
        """
        self._table.require_providers((provider,))
        self._provider, self._scale = provider, scale
        for key, slot in self._slots.items():
            self._set(slot, *key)

    def estimate(self, op: str, ranks: int, nbytes: int) -> Estimate:
        """Time that a collective takes now, before scaling.

        Args:
            op: ``all_reduce``, ``all_gather`` or ``reduce_scatter``.
            ranks: that would meet.
            nbytes: of a rank's operand.

        Raises:
            UserError: the table does not tell.
        """
        found = self._table.lookup(op, self._provider, ranks, nbytes)
        if found is None:
            raise UserError(f"the table of latencies has no {op} of {NCCL}")
        return found

    def peer_memory(self, axis: str) -> ReplayedMemory:
        """Stand-in of what our own kernels would store to."""
        return ReplayedMemory(self._sum_to_norm)

    def gather(self, x: Tensor, axis: str, ranks: int) -> Tensor:
        """The own operand, as often as there are ranks; of experts' numbers, int64, see
        :func:`~dsa_compile.kernels.cuda.replay_collective.replay_choices`."""
        if x.dtype == torch.int64 and self._experts:
            return self._replayed_choices(x.contiguous(), ranks)
        return self._replayed("all_gather", x.contiguous(), ranks, ranks)

    def gather_many(self, xs: Sequence[Tensor], axis: str, ranks: int) -> list[Tensor]:
        """As :meth:`gather` of each, in the time of one message with the bytes of all."""
        if self._waits is None or len(xs) > MOST_OPERANDS:
            return [self.gather(x, axis, ranks) for x in xs]
        xs = [x.contiguous() for x in xs]
        outs = [torch.empty((ranks, *x.shape), dtype=x.dtype, device=x.device) for x in xs]
        slot = self._slot("all_gather", ranks, sum(x.nbytes for x in xs))
        replay_many(xs, outs, ranks, self._experts, self._waits[slot : slot + 1])
        return outs

    def all_reduce(self, x: Tensor, axis: str, ranks: int) -> Tensor:
        """The own operand in place of the sum: finite, and of its size."""
        return self._replayed("all_reduce", x.contiguous(), ranks, 1)[0]

    def reduce_scatter(self, x: Tensor, axis: str, ranks: int) -> Tensor:
        """The first rank's rows of the own operand in place of the sum."""
        return self._replayed("reduce_scatter", x.contiguous(), ranks, 1)[0].chunk(ranks)[0]

    def abort(self) -> None:
        """Nothing waits for anyone."""

    def close(self) -> None:
        """Nobody shares memory."""

    def _replayed(self, op: str, x: Tensor, ranks: int, copies: int) -> Tensor:
        out = torch.empty((copies, *x.shape), dtype=x.dtype, device=x.device)
        if self._waits is None:
            return out.copy_(x.expand_as(out))
        slot = self._slot(op, ranks, x.nbytes)
        wait = self._waits[slot : slot + 1]
        if x.nbytes % CHUNK or x.data_ptr() % CHUNK:
            replay_collective(x[:0], out[:0], wait)
            return out.copy_(x.expand_as(out))
        replay_collective(x, out, wait)
        return out

    def _sum_to_norm(self, x: Tensor, ranks: int) -> Tensor:
        return self._replayed(NORMED, x.contiguous(), ranks, 1)[0]

    def _replayed_choices(self, indices: Tensor, ranks: int) -> Tensor:
        if self._waits is None:
            return turned_choices(indices, ranks, self._experts)
        out = indices.new_empty((ranks, *indices.shape))
        slot = self._slot("all_gather", ranks, indices.nbytes)
        replay_choices(indices, out, self._experts, self._waits[slot : slot + 1])
        return out

    def _slot(self, op: str, ranks: int, nbytes: int) -> int:
        key = (op, ranks, nbytes)
        slot = self._slots.get(key)
        if slot is None:
            if len(self._slots) == _MOST_CALLS:
                raise UserError(f"replayed collectives of more than {_MOST_CALLS} sizes")
            slot = self._slots[key] = len(self._slots)
            self._set(slot, *key)
        return slot

    def _set(self, slot: int, op: str, ranks: int, nbytes: int) -> None:
        wanted = self._us_of(op, ranks, nbytes) * self._scale
        assert self._waits is not None, "only a GPU waits"
        self._waits[slot] = max(0, round((wanted - self._launch_us) * 1e3))

    def _us_of(self, op: str, ranks: int, nbytes: int) -> float:
        if op != NORMED:
            return self.estimate(op, ranks, nbytes).us
        if both := self._table.lookup_normed(self._provider, ranks, nbytes):
            return max(0.0, both.us - self._norm_us)
        return self.estimate("all_reduce", ranks, nbytes).us

    def _measured_launches(self) -> tuple[float, float]:
        """Microseconds of a call beyond its wait, and of a norm behind it.

        The measure is that of the table: among others in a CUDA graph. The call has a wait, so that
        the resolution of the GPU's clock is in it.
        """
        assert self._waits is not None, "only a GPU waits"
        wait = self._waits[:1]
        wait.fill_(round(_PROBE_US * 1e3))
        x = torch.zeros(1, _WIDTH, dtype=torch.bfloat16, device=wait.device)
        out, weight = torch.empty_like(x), torch.ones_like(x[0])

        def call() -> None:
            replay_collective(x, out, wait)

        def call_and_norm() -> None:
            call()
            add_rms_norm_quantize(out, x, weight, 1e-6, False)

        alone, with_norm = _graph_us(call), _graph_us(call_and_norm)
        wait.zero_()
        return max(0.0, alone - _PROBE_US), max(0.0, with_norm - alone)


def _graph_us(call: Callable[[], object]) -> float:
    """Median microseconds of a call among others in a CUDA graph."""
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            for _ in range(_CALLS):
                call()
        times = []
        for _ in range(_REPLAYS):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e3 / _CALLS)
    median: float = statistics.median(times)
    return median


class ReplayedRank(RankGroup):
    """One rank of a layout whose collectives are replayed; see :func:`load_replayed`.

    Attributes:
        collectives: that are replayed.
        runner: of the rank; what it runs without a graph needs ``communicating(collectives)``.
    """

    def __init__(
        self, runner: ModelRunner, communicator: ReplayCommunicator, watch: Watch, timeout: float
    ) -> None:
        alone = ONE_RANK  # it meets nobody, and schedules for its own lane
        super().__init__(runner, alone, (), communicator, watch, timeout, runner.max_num_seqs)
        self.collectives = communicator
        self.runner = runner


def load_replayed(
    path: Path | str, target: str, options: EngineOptions, layout: Layout, experts: int
) -> ReplayedRank:
    """Load one rank of an artifact in this process, on the first GPU.

    Args:
        path: of the artifact.
        target: that it was compiled for.
        options: of loading: ``rank``, ``ranks`` and ``latencies`` among them.
        layout: that it was compiled for.
        experts: that the model's routers choose from.

    Raises:
        ArtifactError: as :func:`load_runner`.
        UserError: likewise; or the layout has no such rank; or the table of latencies is none.
    """
    rank, ranks, world = options.rank, options.ranks, layout.world
    assert rank is not None, "checked by EngineOptions"
    if world == 1 or ranks not in (None, world):
        of = "" if ranks is None else f" of {ranks}"
        count = "one rank" if world == 1 else f"{world} ranks"
        raise UserError(f"{path}: rank {rank}{of} of an artifact of {count}; compile with --tp")
    if rank >= world:
        raise UserError(f"{path}: rank={rank} of {world} ranks: they count from 0")
    table = read_latencies(options.latencies)
    _LOG.warning(
        "rank %d of %d alone, collectives replayed: times are projected, and what is generated "
        "means nothing",
        rank,
        world,
    )
    communicator = ReplayCommunicator(table, device_of(target), experts)
    with communicating(communicator):
        runner = load_runner(path, options, Alone(rank))
    watch = Watch((), communicator.abort)
    return ReplayedRank(runner, communicator, watch, options.rank_timeout)
