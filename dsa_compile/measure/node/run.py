"""Loads of a node: all of its ranks, or one of them with the collectives of the others replayed."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from dsa_compile.errors import UserError
from dsa_compile.inspect.ranks import Exchange, exchanges
from dsa_compile.inspect.store import Store
from dsa_compile.measure.node.layer_profile import StepProfile
from dsa_compile.measure.node.profiling import StepProfiler
from dsa_compile.measure.node.workload import Load, Served, serve, warm_up
from dsa_compile.runtime import Engine, EngineOptions
from dsa_compile.runtime.execution.devices import device_of
from dsa_compile.runtime.loading.load_parts import load_parts
from dsa_compile.runtime.ranks.group import RankGroup
from dsa_compile.runtime.ranks.latencies import LatencyTable
from dsa_compile.runtime.ranks.replay import ReplayedRank

_OPS = ("all_reduce", "all_gather", "reduce_scatter")  # those measured; fused ops begin alike
_BASES = ("measured", "interpolated", "extrapolated")


@dataclass(frozen=True)
class Collectives:
    """Collectives by which ranks exchanged operands.

    Attributes:
        provider: whose collectives ran, or whose latencies were replayed.
        scale: times the latencies; None where they ran.
    """

    provider: str
    scale: float | None

    def __str__(self) -> str:
        """Provider's name, and its factor."""
        return self.provider if self.scale is None else f"{self.provider} {self.scale:g}"


@dataclass(frozen=True)
class Row:
    """One load on a node.

    Attributes:
        load: the requests.
        collectives: how ranks exchanged operands.
        served: times.
        ranks: of the layout.
        communication_ms: of a decode step by the table of latencies; None without one.
        basis: of ``communication_ms``, see :class:`StepCommunication`.
    """

    load: Load
    collectives: Collectives
    served: Served
    ranks: int
    communication_ms: float | None
    basis: str | None = None

    @property
    def projected(self) -> bool:
        """Whether one rank stood for all."""
        return self.collectives.scale is not None

    @property
    def label(self) -> str:
        """Load and collectives of the run, in words."""
        load = self.load
        sizes = f"{load.concurrency} x {load.prompt_tokens}/{load.new_tokens} tokens"
        return f"{'projected, ' if self.projected else ''}{self.collectives}, {sizes}"

    @property
    def tokens_per_user(self) -> float:
        """Tokens a second of one request, while all decode."""
        return 1e3 / self.served.tpot_ms

    @property
    def tokens_per_gpu(self) -> float:
        """Tokens a second of one GPU, while all decode."""
        return self.tokens_per_user * self.load.concurrency / self.ranks

    @property
    def output_per_gpu(self) -> float:
        """Generated tokens a second of one GPU, prompts included in the time."""
        generated = self.load.concurrency * self.load.new_tokens
        return generated / self.served.seconds / self.ranks

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        names = ("tokens_per_user", "tokens_per_gpu", "output_per_gpu")
        derived = {name: getattr(self, name) for name in names}
        return {"projected": self.projected, **asdict(self), **derived}


class NodeBench:
    """Times loads on the ranks of an artifact, which it loads and warms up.

    Args:
        artifact: of several ranks, or of one.
        options: how to load it; ``max_num_seqs`` is of all lanes together.
        by_op: profile a decode step after each row, kernel by kernel.

    Attributes:
        ranks: of the layout.
        title: of tables: measured, or projected and from what.
        load_seconds: until the first tokens were there.
        planned_bytes: memory of the GPU that loading planned to take, None where it planned none.
        profiles: of the rows so far.

    Raises:
        ArtifactError: as :func:`~dsa_compile.runtime.loading.load_runner.load_runner`.
        UserError: likewise; or a step cannot be profiled.
    """

    def __init__(self, artifact: Path, options: EngineOptions, by_op: bool = False) -> None:
        began = time.perf_counter()
        if by_op and options.collectives != "replay":
            raise UserError("--by-op profiles one rank alone: give --collectives replay with it")
        store = Store.open(artifact)
        layout = store.manifest.compile.layout
        self.ranks: int = layout.world
        self._lanes: int = layout.dp
        options = replace(options, max_num_seqs=-(-options.max_num_seqs // self._lanes))
        if by_op:
            _check_profiling(artifact, store)
        self._exchanges = exchanges(store)
        runner = load_parts(artifact, options)["runner"]
        self._replayed = runner if isinstance(runner, ReplayedRank) else None
        self.title = f"measured: {self.ranks} rank{'s' if self.ranks > 1 else ''}"
        if self._replayed:
            rank = f"rank {options.rank} of {self.ranks}"
            self.title = f"projected: {rank} alone, collectives replayed"
        self._collectives = options.collectives if self.ranks > 1 else "none"
        self.planned_bytes = runner.planned_bytes
        self.device = runner.device
        self.engine = Engine(runner, options)
        self._runner = runner
        warm_up(self.engine, 1)
        self.load_seconds = time.perf_counter() - began
        self.profiles: list[StepProfile] = []
        self._profiler: StepProfiler | None = None
        if by_op and self._replayed and options.max_model_len:
            self._profiler = StepProfiler(artifact, self._replayed, options.max_model_len)

    def run(
        self,
        loads: Sequence[Load],
        table: LatencyTable | None,
        latencies: Sequence[Collectives],
    ) -> Iterator[Row]:
        """Yield the rows, load by load.

        Args:
            loads: one after the other, of all lanes; a rank alone serves the share of its own.
            table: to say how long the collectives of a step take; None for not.
            latencies: to replay, where the ranks are not there.
        """
        for load in loads:
            for how in latencies if self._replayed else (Collectives(self._collectives, None),):
                if self._replayed and how.scale is not None:
                    self._replayed.collectives.replay(how.provider, how.scale)
                of_lane = replace(load, concurrency=-(-load.concurrency // self._lanes))
                served = serve(self.engine, of_lane if self._replayed else load)
                found, ms = None, None
                if table is not None and self.ranks > 1:
                    rows = of_lane.concurrency
                    found = step_communication(self._exchanges, table, how.provider, rows)
                if found is not None:
                    ms = found.us * (1.0 if how.scale is None else how.scale) / 1e3
                row = Row(load, how, served, self.ranks, ms, found.basis if found else None)
                if self._profiler is not None:
                    self.profiles.append(self._profiler.profile(of_lane, row.label))
                yield row

    def to_dict(self, rows: Sequence[Row]) -> dict[str, Any]:
        """Rows and what holds for all of them, as plain data."""
        return {
            "projected": self._replayed is not None,
            "ranks": self.ranks,
            "seconds_to_first_tokens": self.load_seconds,
            "planned_bytes": self.planned_bytes,
            "used_bytes": self.used_bytes,
            "late_kernels": self.engine.stats().late_kernels,
            "rows": [row.to_dict() for row in rows],
            "profiles": [profile.to_dict() for profile in self.profiles],
        }

    def __enter__(self) -> "NodeBench":
        return self

    def __exit__(self, *error: object) -> None:
        """Free the engine and end the other ranks."""
        self.engine.close()
        if isinstance(self._runner, RankGroup):
            self._runner.close()

    @property
    def used_bytes(self) -> int | None:
        """Memory of this rank's GPU in use, by this process and by others; None on a CPU."""
        if self.device.type != "cuda":
            return None
        free, total = torch.cuda.mem_get_info(self.device)
        return int(total - free)


def _check_profiling(artifact: Path, store: Store) -> None:
    """Refuse an artifact of which no step can be profiled, before it is loaded.

    Raises:
        UserError: says why.
    """
    if device_of(store.manifest.target).type != "cuda":
        raise UserError(f"--by-op profiles a GPU's kernels, and {artifact} is for a CPU")
    if store.manifest.compile.layout.world == 1:
        raise UserError(f"--by-op profiles a rank of several, and {artifact} has one")


@dataclass(frozen=True)
class StepCommunication:
    """All collectives of a decode step, one after the other.

    Attributes:
        us: microseconds by the table.
        basis: ``measured`` of so many ranks; else the weakest of what they follow from,
            ``interpolated`` or ``extrapolated``.
    """

    us: float
    basis: str


def step_communication(
    found: Sequence[Exchange], table: LatencyTable, provider: str, rows: int
) -> StepCommunication | None:
    """Communication of a decode step by the table of latencies.

    Args:
        found: what the program exchanges.
        table: of latencies.
        provider: whose.
        rows: requests of the step.

    Returns:
        None if the table lacks one of them.
    """
    total, weakest = 0.0, 0
    for exchange in found:
        for message in exchange.messages:
            op = next(op for op in _OPS if message.op.startswith(op))
            latency = table.lookup(op, provider, message.ranks, message.row_bytes * rows)
            if latency is None:
                return None
            total += exchange.calls * latency.us
            weakest = max(weakest, _BASES.index(latency.basis))
    return StepCommunication(total, _BASES[weakest])
