"""Decode steps as CUDA graphs: one launch a step instead of some dozen a layer.

There is one for each number of rows and each width of the block table that steps are rounded up to,
of each variant. A step is padded to the smallest that takes it. A padded row is one token that
nobody owns: its context is empty, it writes no cache row (slot -1), and its block table names no
page (-1), so whatever it computes is finite and nobody reads it.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dsa_compile.ir.plan import LONG
from dsa_compile.runtime.execution.batch import Batch
from dsa_compile.runtime.execution.captured_steps import CapturedSteps, StepParts
from dsa_compile.runtime.execution.graph_plan import GraphKey, GraphPlan
from dsa_compile.runtime.execution.pinned_staging import Layout


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


class DecodeGraphs(CapturedSteps[GraphKey]):
    """Captured decode steps, whose logits are those of every request.

    Args:
        plan: which.
        parts: what is captured, and on what.
    """

    def __init__(self, plan: GraphPlan, parts: StepParts) -> None:
        super().__init__(plan, parts)
        most, device = plan.rows[-1], parts.token_buffer.device
        self._starts = torch.arange(most + 1, dtype=torch.int32, device=device)
        self._every_row = torch.arange(most, dtype=torch.int64, device=device)

    def layout(self, key: GraphKey) -> Layout:
        """See :func:`decode_layout`."""
        return decode_layout(key)

    def write(self, batch: Batch | None, views: Mapping[str, NDArray[Any]]) -> None:
        """See :func:`write_padded`."""
        write_padded(batch, views)

    def inputs(self, key: GraphKey, sent: dict[str, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
        """With constants: each row is a token of its own, whose logits are wanted."""
        rows = sent.pop("request_rows")
        sent["cu_seqlens"] = self._starts[: key.rows + 1]
        sent["logit_rows"] = self._every_row[: key.rows]
        return sent, rows

    def count(self, batch: Batch) -> int:
        """Requests."""
        return batch.num_requests

    def size(self, key: GraphKey) -> str:
        """Requests, padding included."""
        return str(key.rows)

    def title(self, key: GraphKey) -> str:
        """By its rows."""
        return f"a decode step of {key.rows} rows"
