"""Decode steps as CUDA graphs: one launch a step instead of some dozen a layer.

There is one for each number of rows and each width of the block table that steps are rounded up to,
of each variant. A step is padded to the smallest that takes it, with idle requests of one token.
"""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from dsa_compile.runtime.execution.batch import Batch
from dsa_compile.runtime.execution.captured_steps import CapturedSteps, StepParts
from dsa_compile.runtime.execution.graph_plan import GraphKey, GraphPlan
from dsa_compile.runtime.execution.idle_rows import padded
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


def padded_batch(batch: Batch, rows: int, columns: int) -> Batch:
    """A decode step with padded rows behind its own; it gives the logits of all of them."""
    made = padded(batch, rows, rows, columns, one_each=True)
    return replace(made, logit_rows=np.arange(rows))


class DecodeGraphs(CapturedSteps[GraphKey]):
    """Captured decode steps, whose logits are those of every request."""

    def __init__(self, plan: GraphPlan, parts: StepParts) -> None:
        super().__init__(plan, parts)
        most, device = plan.rows[-1], parts.token_buffer.device
        self._starts = torch.arange(most + 1, dtype=torch.int32, device=device)
        self._every_row = torch.arange(most, dtype=torch.int64, device=device)

    def layout(self, key: GraphKey) -> Layout:
        """See :func:`decode_layout`."""
        return decode_layout(key)

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
