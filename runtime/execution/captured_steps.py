"""Steps of fixed sizes, each as one CUDA graph.

A graph freezes shapes, addresses and the choice of kernels: what changes from step to step is sent
to where the graphs read it, and logits are read where they leave them.

Decode steps and steps with prompt tokens are captured up to their logits, by the class here; those
with drafts with the choice of their tokens, by
:class:`~dsa_compile.runtime.execution.drafted_graphs.DraftedGraphs`. One class for all, keyed by
variant, rows, tokens of each and prompt tokens, would have to keep what graphs depend on: a memory
pool for each kind and captures from the largest to the smallest; one buffer of inputs for each
kind, where arrays lie one after another; logits and outcomes outside the pools.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from dsa_compile.runtime.execution.batch import Batch
from dsa_compile.runtime.execution.idle_rows import write_padded
from dsa_compile.runtime.execution.pinned_staging import Layout, StagingRing
from dsa_compile.runtime.failures.step_errors import while_doing
from dsa_compile.runtime.scheduling.stats import StepKind


class SizeKey(Protocol):
    """Key of the steps that a graph takes."""

    @property
    def variant(self) -> str:
        """The regions' variant."""
        ...

    @property
    def rows(self) -> int:
        """Rows of logits."""
        ...


Key = TypeVar("Key", bound=SizeKey)
Planned = TypeVar("Planned", bound=SizeKey, covariant=True)


class SizePlan(Protocol[Planned]):
    """The graphs that there may be."""

    @property
    def rows(self) -> Sequence[int]:
        """Rows of logits that graphs have, ascending."""
        ...

    def graphs(self) -> Iterable[Planned]:
        """Keys of all graphs, the ones that need the most memory first."""
        ...

    def choose(self, batch: Batch, variant: str) -> Planned | None:
        """The smallest graph for a step, or None if it must run without one."""
        ...


@dataclass(frozen=True)
class StepParts:
    """Parts that all captured steps of a runner share.

    Attributes:
        run: runs the regions of a variant on a step's tensors and returns its logits; it neither
            synchronises nor reads device memory on the host.
        resolve: input ids, request rows and the sampled tokens to the tokens of the step.
        token_buffer: int64, the last sampled token of each request row.
        vocab_size: width of the logits.
        ring: staging of inputs.
    """

    run: Callable[[dict[str, Tensor], str], Tensor]
    resolve: Callable[[Tensor, Tensor, Tensor], Tensor]
    token_buffer: Tensor
    vocab_size: int
    ring: StagingRing


@dataclass(frozen=True)
class _Captured:
    layout: Layout
    graph: torch.cuda.CUDAGraph


class CapturedSteps(Generic[Key]):
    """Captured steps of one kind; a subclass says what is sent for a step and what it is called."""

    def __init__(self, plan: SizePlan[Key], parts: StepParts) -> None:
        self.plan = plan
        self._parts = parts
        device = parts.token_buffer.device
        largest = max(self.layout(key).nbytes for key in plan.graphs())
        self._inputs = torch.empty(largest, dtype=torch.uint8, device=device)
        # Graphs share one memory pool, so that each may overwrite what another leaves; the logits
        # are kept apart.
        shape = (plan.rows[-1], parts.vocab_size)
        self._logits = torch.empty(shape, dtype=torch.float32, device=device)
        self._captured: dict[Key, _Captured] = {}
        self.replays: Counter[StepKind] = Counter()
        self._pool = torch.cuda.graph_pool_handle()

    def layout(self, key: Key) -> Layout:
        """Arrays that are sent for a step."""
        raise NotImplementedError

    def inputs(self, key: Key, sent: dict[str, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
        """The step's tensors from those that were sent, and the request row of each token."""
        raise NotImplementedError

    def count(self, batch: Batch) -> int:
        """Rows of a step's logits."""
        return len(batch.logit_rows)

    def size(self, key: Key) -> str:
        """The size of a graph's steps in statistics."""
        raise NotImplementedError

    def title(self, key: Key) -> str:
        """The steps of a graph in an error's words."""
        raise NotImplementedError

    def capture(self, keys: Sequence[Key] | None = None) -> None:
        """Capture all graphs, or these ones.

        Each runs once before, on padding only: kernels are compiled and loaded then.

        Raises:
            StepError: an op failed, or the GPU did; names the op where one raised.
        """
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for key in keys or tuple(self.plan.graphs()):
                layout = self.layout(key)
                run = partial(self._run, key, layout)
                try:
                    self._send(layout, None)
                    run()
                    graph = captured_graph(run, self._pool, stream)
                except Exception as error:
                    raise while_doing(error, f"{self.title(key)} was captured") from error
                self._captured[key] = _Captured(layout, graph)
        torch.cuda.current_stream().wait_stream(stream)

    def forward(self, batch: Batch, variant: str) -> Tensor | None:
        """Launch a step; fp32 ``[N, V]`` logits, or None if there is no graph for it.

        The next step overwrites them.
        """
        key = self.plan.choose(batch, variant)
        captured = None if key is None else self._captured.get(key)
        if key is None or captured is None:
            return None
        self._send(captured.layout, batch)
        captured.graph.replay()
        self.replays[StepKind(self.size(key), key.variant)] += 1
        return self._logits[: self.count(batch)]

    def _send(self, layout: Layout, batch: Batch | None) -> None:
        write_padded(batch, self._parts.ring.take_views(layout))
        self._parts.ring.send(self._inputs[: layout.nbytes])

    def _run(self, key: Key, layout: Layout) -> None:
        tensors, rows = self.inputs(key, layout.in_torch(self._inputs))
        parts = self._parts
        tensors["input_ids"] = parts.resolve(tensors["input_ids"], rows, parts.token_buffer)
        self._logits[: key.rows].copy_(parts.run(tensors, key.variant))


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
