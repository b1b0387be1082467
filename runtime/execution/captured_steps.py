"""Steps of fixed sizes, each as one CUDA graph: one launch instead of some dozen a layer.

A graph freezes shapes, addresses and the choice of kernels: what changes from step to step is sent
to where the graphs read it, and results are read where they leave them. A step is padded to the
smallest graph that takes it, with rows that are no request's.

The graphs of a plan share a memory pool, so that each may overwrite what another leaves, and are
captured from the largest to the smallest. They share one buffer of inputs, where arrays lie one
after another, and one of results, outside the pool. Plain decode steps and steps with prompt tokens
are captured up to their logits. Those with drafts are captured whole, so that the next one can be
launched before the host knows the tokens of the last. Where no graph was captured, as on a CPU, the
same padded work is launched op by op.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dsa_compile.runtime.execution.batch import Batch
from dsa_compile.runtime.execution.graph_plan import GraphKey, GraphPlan
from dsa_compile.runtime.execution.pinned_staging import Layout, StagingRing
from dsa_compile.runtime.failures.step_errors import while_doing
from dsa_compile.runtime.scheduling.stats import EAGER, StepKind


class SentInputs(Protocol):
    """What the host sends for the steps of one size."""

    @property
    def layout(self) -> Layout:
        """Arrays that are sent."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of them."""
        ...

    def in_numpy(self, buffer: NDArray[np.uint8]) -> Any:
        """Views through which a buffer on the host is filled."""
        ...

    @property
    def write(self) -> Callable[..., Sequence[int]]:
        """Fills these views with a step, or with idle rows alone; returns the places in the result
        of the requests that yield, where the caller needs them."""
        ...

    def constants(self, device: torch.device) -> dict[str, Tensor]:
        """Tensors that all these steps share, by name."""
        ...


@dataclass(frozen=True)
class StepParts:
    """What captured steps of a kind are made of.

    Attributes:
        inputs: gives what the host sends for the steps of a size.
        run: runs a step of a variant on its tensors and returns its result, one row for each
            request; it neither synchronises nor reads device memory on the host.
        width: gives the columns of the result of a size.
        dtype: of the results.
        device: where the steps run.
        ring: staging of inputs; None on the CPU.
    """

    inputs: Callable[[GraphKey], SentInputs]
    run: Callable[[dict[str, Tensor], str], Tensor]
    width: Callable[[GraphKey], int]
    dtype: torch.dtype
    device: torch.device
    ring: StagingRing | None


@dataclass(frozen=True)
class _Size:
    """Views of a step's memory on the device, and constants, by name in ``step``."""

    sent: SentInputs
    memory: Tensor
    step: dict[str, Tensor]


@dataclass(frozen=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    result: Tensor
    kind: StepKind


class CapturedSteps:
    """Padded steps, captured or not.

    Attributes:
        plan: the graphs that there may be; None before any is captured.
        steps: so far, by how they ran.
    """

    def __init__(self, parts: StepParts) -> None:
        self._parts = parts
        self._captured: dict[GraphKey, _Captured] = {}
        self._sizes: dict[GraphKey, _Size] = {}
        self.steps: Counter[StepKind] = Counter()
        self.drop()

    def drop(self) -> None:
        """Give captured steps up, with the memory that they share; later ones may be larger."""
        self.plan: GraphPlan | None = None
        self._pool: Any = None
        self._captured.clear()
        self._sizes.clear()
        self._inputs = torch.empty(0, dtype=torch.uint8, device=self._parts.device)
        self._results = torch.empty(0, dtype=self._parts.dtype, device=self._parts.device)

    def capture(self, plan: GraphPlan, keys: Sequence[GraphKey] | None = None) -> None:
        """Capture all graphs of a plan, or these ones; those of another plan are given up.

        Each runs once before, on padding only: kernels are compiled and loaded then.

        Raises:
            StepError: an op failed, or the GPU did; names the op where one raised.
        """
        if self.plan != plan:
            self.drop()
            every = tuple(plan.graphs())
            self._reserve(max(self._parts.inputs(key).nbytes for key in every))
            results = max(key.rows * self._parts.width(key) for key in every)
            self._results = self._results.new_empty(results)
            self.plan, self._pool = plan, torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for key in keys or tuple(plan.graphs()):
                try:
                    self._captured[key] = self._graph_of(key, stream)
                except Exception as error:
                    raise while_doing(error, f"{key.title} was captured") from error
        torch.cuda.current_stream().wait_stream(stream)

    def _graph_of(self, key: GraphKey, stream: torch.cuda.Stream) -> _Captured:
        shape = key.rows, self._parts.width(key)
        result = self._results[: shape[0] * shape[1]].view(shape)
        self._send(key)

        def run() -> None:
            result.copy_(self._run(key))

        run()
        graph = captured_graph(run, self._pool, stream)
        return _Captured(graph, result, StepKind(key.size, key.variant))

    def choose(self, batch: Batch, variant: str) -> GraphKey | None:
        """The smallest captured size of the plan that takes a step, or None."""
        key = None if self.plan is None else self.plan.choose(batch, variant)
        return key if key in self._captured else None

    def launch(self, key: GraphKey, *step: Any) -> tuple[Tensor, Sequence[int]]:
        """Launch a step.

        Args:
            key: a size that takes it, captured or not.
            step: what :attr:`SentInputs.write` takes.

        Returns:
            Its result, padding included, which the next step overwrites; and what ``write`` gave.
        """
        places = self._send(key, *step)
        captured = self._captured.get(key)
        if captured is None:
            self.steps[StepKind(EAGER, key.variant)] += 1
            return self._run(key), places
        captured.graph.replay()
        self.steps[captured.kind] += 1
        return captured.result, places

    def _send(self, key: GraphKey, *step: Any) -> Sequence[int]:
        """Bring a step's inputs to where its graph reads them; without a step, idle rows."""
        size, ring = self._size_of(key), self._parts.ring
        sent = size.sent
        if ring is None:
            return sent.write(sent.in_numpy(size.memory.numpy()), *step)
        places = sent.write(ring.take_views(sent), *step)
        ring.send(size.memory)
        return places

    def _reserve(self, nbytes: int) -> None:
        """Make room for inputs: never again after a capture, since graphs know where they are."""
        if len(self._inputs) < nbytes:
            assert not self._captured, "a graph reads its inputs where they were"
            self._inputs = self._inputs.new_empty(nbytes)
            self._sizes.clear()

    def _size_of(self, key: GraphKey) -> _Size:
        if key not in self._sizes:
            sent = self._parts.inputs(key)
            self._reserve(sent.nbytes)
            memory = self._inputs[: sent.nbytes]
            step = sent.layout.in_torch(memory) | sent.constants(self._parts.device)
            self._sizes[key] = _Size(sent, memory, step)
        return self._sizes[key]

    def _run(self, key: GraphKey) -> Tensor:
        return self._parts.run(dict(self._size_of(key).step), key.variant)


def captured_graph(
    run: Callable[[], object], pool: Any, stream: torch.cuda.Stream
) -> torch.cuda.CUDAGraph:
    """Capture what a call launches, after it ran once.

    Args:
        run: neither synchronises nor reads device memory on the host.
        pool: memory that graphs share.
        stream: the current one.
    """
    graph = torch.cuda.CUDAGraph()
    stream.synchronize()
    # other threads go on copying weights
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    try:
        run()
    except BaseException:
        # Broken off between two streams it cannot end without an error, which would hide this.
        with suppress(RuntimeError):
            graph.capture_end()
        raise
    graph.capture_end()
    return graph
