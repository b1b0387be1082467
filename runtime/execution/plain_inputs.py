"""Host inputs of a step without drafts, padded to a size that a graph has.

In a decode step idle requests have an idle token each. In a step with prompt tokens they have none:
idle tokens lie behind those of the last request, where ``cu_seqlens`` ends, and take no expert.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dsa_compile.runtime.execution.batch import Batch
from dsa_compile.runtime.execution.graph_plan import GraphKey
from dsa_compile.runtime.execution.idle_rows import padded, write_padded
from dsa_compile.runtime.execution.pinned_staging import Layout


class PlainInputs:
    """Inputs that the host sends for the steps of a size.

    Attributes:
        layout: of what is sent.
        nbytes: of a step.
    """

    def __init__(self, key: GraphKey) -> None:
        tokens, rows = key.mixed_tokens or key.rows, key.rows
        arrays: dict[str, tuple[Sequence[int], Any]] = {
            "input_ids": ((tokens,), np.int64),
            "positions": ((tokens,), np.int64),
            "slot_mapping": ((tokens,), np.int64),
            "token_rows": ((tokens,), np.int32),
        }
        if key.mixed_tokens:
            arrays["logit_rows"] = (rows,), np.int64
            arrays["cu_seqlens"] = (rows + 1,), np.int32
        arrays["context_lens"] = (rows,), np.int32
        arrays["block_tables"] = (rows, key.columns), np.int32
        self.layout = Layout(arrays)
        self.nbytes = self.layout.nbytes
        self._rows = rows

    def in_numpy(self, buffer: NDArray[np.uint8]) -> dict[str, NDArray[Any]]:
        """Views through which a buffer on the host is filled with a step."""
        return self.layout.in_numpy(buffer)

    def write(self, views: Mapping[str, NDArray[Any]], batch: Batch | None = None) -> Sequence[int]:
        """Fill the memory of a step, with idle rows only where there is no batch."""
        write_padded(batch, views)
        return ()

    def constants(self, device: torch.device) -> dict[str, Tensor]:
        """What is not sent: in a decode step each row is a token whose logits are wanted."""
        made = {
            "cu_seqlens": torch.arange(self._rows + 1, dtype=torch.int32, device=device),
            "logit_rows": torch.arange(self._rows, device=device),
        }
        return {} if "cu_seqlens" in self.layout.places else made


def padded_batch(batch: Batch, rows: int, columns: int, tokens: int = 0) -> Batch:
    """A step with the padding of a graph.

    Args:
        batch: the step.
        rows: requests of the graph.
        columns: width of its block table.
        tokens: of a step with prompt tokens, whose own logits come first; 0 for a decode step,
            which gives the logits of all rows.
    """
    if not tokens:
        made = padded(batch, rows, rows, columns, one_each=True)
        return replace(made, logit_rows=np.arange(rows))
    logit_rows = np.pad(batch.logit_rows, (0, rows - len(batch.logit_rows)))
    return replace(padded(batch, tokens, rows, columns), logit_rows=logit_rows)
