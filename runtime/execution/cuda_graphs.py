"""Decode steps as CUDA graphs: one launch a step instead of some dozen a layer.

A graph freezes shapes, addresses and the choice of kernels, so there is one for each number of rows
and each width of the block table that steps are rounded up to, of each variant. A step is padded to
the smallest that takes it. A padded row is one token that nobody owns: its context is empty, it
writes no cache row (slot -1), and its block table names no page (-1), so whatever it computes is
finite and nobody reads it.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dsa_compile.ir.plan import LONG
from dsa_compile.runtime.execution.batch import Batch
from dsa_compile.runtime.execution.graph_plan import GraphKey, GraphPlan
from dsa_compile.runtime.execution.pinned_staging import Layout, StagingRing
from dsa_compile.runtime.failures.step_errors import while_doing
from dsa_compile.runtime.scheduling.stats import StepKind

Step = Callable[[dict[str, Tensor], str], Tensor]
"""Runs the regions of a variant on a step's tensors; returns the logits."""

CapturedParts = tuple[Step, Callable[[Tensor, Tensor, Tensor], Tensor], Tensor, int, StagingRing]
"""The arguments of :class:`DecodeGraphs` behind its plan."""


def decode_layout(key: GraphKey) -> Layout:
    """The inputs of a graph that change from step to step."""
    rows = key.rows
    return Layout(
        {
            "input_ids": ((rows,), np.int64),
            "positions": ((rows,), np.int64),
            "slot_mapping": ((rows,), np.int64),
            "request_rows": ((rows,), np.int32),
            "context_lens": ((rows,), np.int32),
            "block_tables": ((rows, key.columns), np.int32),
        }
    )


# What a padded row holds.
_PADDING = {
    "input_ids": 0,
    "positions": 0,
    "slot_mapping": -1,
    "request_rows": -1,
    "context_lens": 0,
    "block_tables": -1,
}


def write_padded(batch: Batch | None, views: Mapping[str, NDArray[Any]]) -> None:
    """Fill a graph's inputs with a decode step and padding.

    Args:
        batch: one token a request, at most as many and as wide as the views; None for padding only.
        views: of :func:`decode_layout`.
    """
    for name, view in views.items():
        padding = _PADDING[name]
        if batch is None:
            view.fill(padding)
            continue
        array = getattr(batch, name)
        count = len(array)
        view[count:] = padding
        if array.ndim == 2:
            view[:count, : array.shape[1]] = array
            view[:count, array.shape[1] :] = padding
        else:
            view[:count] = array


def padded_batch(batch: Batch, rows: int, columns: int) -> Batch:
    """A decode step with padded rows behind its own; it gives the logits of all of them.

    Args:
        batch: one token a request.
        rows: of the result.
        columns: width of its block table.
    """
    layout = decode_layout(GraphKey(LONG, rows, columns))
    views = layout.in_numpy(np.empty(layout.nbytes, np.uint8))
    write_padded(batch, views)
    return Batch(
        **views,
        cu_seqlens=np.arange(rows + 1, dtype=np.int32),
        logit_rows=np.arange(rows),
        tokens_each=1,
    )


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


@dataclass
class _Captured:
    layout: Layout
    graph: torch.cuda.CUDAGraph


class DecodeGraphs:
    """Captured decode steps.

    Args:
        plan: which.
        step: what is captured; it must neither synchronise nor read device memory on the host.
        resolve: input ids, request rows and the sampled tokens to the tokens of the step.
        token_buffer: int64, the last sampled token of each request row.
        vocab_size: width of the logits.
        ring: staging of inputs.
    """

    def __init__(
        self,
        plan: GraphPlan,
        step: Step,
        resolve: Callable[[Tensor, Tensor, Tensor], Tensor],
        token_buffer: Tensor,
        vocab_size: int,
        ring: StagingRing,
    ) -> None:
        self.plan = plan
        self._step, self._resolve, self._token_buffer = step, resolve, token_buffer
        self._ring = ring
        device = token_buffer.device
        most = plan.rows[-1]
        largest = max(decode_layout(key).nbytes for key in plan.graphs())
        self._inputs = torch.empty(largest, dtype=torch.uint8, device=device)
        # Graphs share one memory pool, so that each may overwrite what another leaves; the logits
        # are kept apart.
        self._logits = torch.empty((most, vocab_size), dtype=torch.float32, device=device)
        self._starts = torch.arange(most + 1, dtype=torch.int32, device=device)
        self._every_row = torch.arange(most, dtype=torch.int64, device=device)
        self._captured: dict[GraphKey, _Captured] = {}
        self.replays: Counter[StepKind] = Counter()
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, keys: Sequence[GraphKey] | None = None) -> None:
        """Capture all graphs, or these ones.

        Each runs once before, on padded rows only: kernels are compiled and loaded then.

        Raises:
            StepError: an op failed, or the GPU did; names the op where one raised.
        """
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for key in keys or tuple(self.plan.graphs()):
                layout = decode_layout(key)
                try:
                    graph = self._graph_of(key, layout, stream)
                except Exception as error:
                    doing = f"a decode step of {key.rows} rows was captured"
                    raise while_doing(error, doing) from error
                self._captured[key] = _Captured(layout, graph)
        torch.cuda.current_stream().wait_stream(stream)

    def _graph_of(
        self, key: GraphKey, layout: Layout, stream: torch.cuda.Stream
    ) -> torch.cuda.CUDAGraph:
        self._upload(layout, None)
        self._run(key, layout)
        return captured_graph(lambda: self._run(key, layout), self._pool, stream)

    def forward(self, batch: Batch, variant: str) -> Tensor | None:
        """Launch a step; fp32 ``[R, V]`` logits, or None if there is no graph for it.

        The logits are those of every request; they are overwritten by the next step.
        """
        key = self.plan.choose(batch, variant)
        captured = None if key is None else self._captured.get(key)
        if key is None or captured is None:
            return None
        self._upload(captured.layout, batch)
        captured.graph.replay()
        self.replays[StepKind(str(key.rows), key.variant)] += 1
        return self._logits[: batch.num_requests]

    def _upload(self, layout: Layout, batch: Batch | None) -> None:
        write_padded(batch, self._ring.take_views(layout))
        self._ring.send(self._inputs[: layout.nbytes])

    def _run(self, key: GraphKey, layout: Layout) -> None:
        tensors = layout.in_torch(self._inputs)
        rows = tensors.pop("request_rows")
        tensors["input_ids"] = self._resolve(tensors["input_ids"], rows, self._token_buffer)
        tensors["cu_seqlens"] = self._starts[: key.rows + 1]
        tensors["logit_rows"] = self._every_row[: key.rows]
        self._logits[: key.rows].copy_(self._step(tensors, key.variant))
