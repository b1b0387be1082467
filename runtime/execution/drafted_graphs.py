"""Decode steps with drafts at a few sizes, each as one CUDA graph.

A graph holds all of a step: deeper drafts, the model over every request's last token and drafts,
sampling, the count of drafts that were right, first drafts of the next step. What it needs to know
of the step before is on the device, so it can be launched before the host knows that step's tokens.

Steps are padded to the sizes with and without graphs, by the same code: on a CPU, or where none was
captured, the same work is launched op by op.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dsa_compile.runtime.execution.captured_steps import captured_graph
from dsa_compile.runtime.execution.draft_inputs import PaddedInputs, padded_constants
from dsa_compile.runtime.execution.graph_plan import GraphKey, GraphPlan
from dsa_compile.runtime.execution.pinned_staging import StagingRing
from dsa_compile.runtime.execution.runner import StepInputs
from dsa_compile.runtime.failures.step_errors import while_doing
from dsa_compile.runtime.scheduling.stats import EAGER, StepKind

Step = Callable[[dict[str, Tensor], str], Tensor]
"""Runs a padded step of a variant; returns its outcome, int64 ``[R, 1 + W]``: how many tokens count
of each request, and a token of every row."""


@dataclass
class _Captured:
    graph: torch.cuda.CUDAGraph
    outcome: Tensor
    kind: StepKind


@dataclass(frozen=True)
class _Size:
    """Memory that steps of a size share.

    Attributes:
        sent: what is sent for one.
        memory: uint8, where a graph reads it.
        step: views of that memory, and constants, by name.
    """

    sent: PaddedInputs
    memory: Tensor
    step: dict[str, Tensor]


class DraftedGraphs:
    """Padded steps, captured or not.

    Args:
        step: what is run; it must neither synchronise nor read device memory on the host.
        device: where.
        nobody: row of the state that is no request's.
        ring: staging of inputs; None on the CPU.
    """

    def __init__(
        self, step: Step, device: torch.device, nobody: int, ring: StagingRing | None
    ) -> None:
        self._step, self._device, self._nobody, self._ring = step, device, nobody, ring
        self._inputs = torch.empty(0, dtype=torch.uint8, device=device)
        self._sizes: dict[tuple[int, int, int], _Size] = {}
        self._constants: dict[tuple[int, int], dict[str, Tensor]] = {}
        self._captured: dict[GraphKey, _Captured] = {}
        self.steps: Counter[StepKind] = Counter()

    def capture(self, plan: GraphPlan, keys: Sequence[GraphKey] | None = None) -> None:
        """Capture all graphs of a plan, or these ones; each runs once before, on padding only.

        Raises:
            StepError: an op failed, or the GPU did; names the op where one raised.
        """
        pool = torch.cuda.graph_pool_handle()
        self._reserve(max(self._inputs_of(key).nbytes for key in plan.graphs()))
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for key in keys or tuple(plan.graphs()):
                self._send(key, None, None)
                try:
                    self._captured[key] = self._graph_of(key, pool, stream)
                except Exception as error:
                    doing = f"a decode step of {key.rows} requests with drafts was captured"
                    raise while_doing(error, doing) from error
        torch.cuda.current_stream().wait_stream(stream)

    @property
    def captured(self) -> bool:
        """Whether there are captured steps."""
        return bool(self._captured)

    def drop(self) -> None:
        """Give captured steps up, with the memory of their inputs; later ones may be larger."""
        self._captured.clear()
        self._sizes.clear()
        self._inputs = torch.empty(0, dtype=torch.uint8, device=self._device)

    def _graph_of(self, key: GraphKey, pool: Any, stream: torch.cuda.Stream) -> _Captured:
        self._run(key)
        # Kept apart from the pool, in which the next graph may overwrite it.
        shape = (key.rows, 1 + key.tokens_each)
        outcome = torch.empty(shape, dtype=torch.int64, device=self._device)
        graph = captured_graph(lambda: outcome.copy_(self._run(key)), pool, stream)
        return _Captured(graph, outcome, StepKind(str(key.rows), key.variant))

    def launch(
        self, key: GraphKey, inputs: StepInputs, options: NDArray[np.void]
    ) -> tuple[Tensor, Sequence[int]]:
        """Launch a step.

        Args:
            key: a size that takes it.
            inputs: the step.
            options: of its requests that yield, [Y].

        Returns:
            Its outcome, to be used before the next step, and the places in it of these requests.
        """
        places = self._send(key, inputs, options)
        captured = self._captured.get(key)
        if captured is None:
            self.steps[StepKind(EAGER, key.variant)] += 1
            return self._run(key), places
        captured.graph.replay()
        self.steps[captured.kind] += 1
        return captured.outcome, places

    def _send(
        self, key: GraphKey, inputs: StepInputs | None, options: NDArray[np.void] | None
    ) -> Sequence[int]:
        """Bring a step's inputs to where its graph reads them."""
        size = self._size_of(key)
        sent = size.sent
        if self._ring is None:
            return sent.write(sent.in_numpy(size.memory.numpy()), inputs, options)
        places = sent.write(self._ring.take_views(sent), inputs, options)
        self._ring.send(size.memory)
        return places

    def _reserve(self, nbytes: int) -> None:
        """Make room for inputs; graphs know where they are, so never again behind a capture."""
        if len(self._inputs) < nbytes:
            assert not self._captured, "a graph reads its inputs where they were"
            self._inputs = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
            self._sizes.clear()

    def _inputs_of(self, key: GraphKey) -> PaddedInputs:
        return PaddedInputs(key.rows, key.tokens_each, key.columns, self._nobody)

    def _size_of(self, key: GraphKey) -> _Size:
        shape = key.rows, key.tokens_each, key.columns
        if shape not in self._sizes:
            sent = self._inputs_of(key)
            self._reserve(sent.nbytes)
            size = shape[:2]
            if size not in self._constants:
                self._constants[size] = padded_constants(*size, self._device)
            memory = self._inputs[: sent.nbytes]
            step = sent.layout.in_torch(memory) | self._constants[size]
            self._sizes[shape] = _Size(sent, memory, step)
        return self._sizes[shape]

    def _run(self, key: GraphKey) -> Tensor:
        return self._step(self._size_of(key).step, key.variant)
