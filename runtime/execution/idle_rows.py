"""Rows of a step that are no request's: they pad it to a size that a graph or another lane has.

An idle token has an empty context, writes no cache row (slot -1) and reads no page (-1), so what it
computes is finite and nobody looks at it. Idle requests have no tokens, or one idle token each.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from dsa_compile.runtime.execution.batch import Batch

IDLE = {
    "input_ids": 0,
    "positions": 0,
    "slot_mapping": -1,
    "token_rows": -1,
    "following": -1,
    "request_rows": -1,
    "context_lens": 0,
    "block_tables": -1,
    "logit_rows": 0,
    "max_new": 1,
}
"""What an idle row holds, by the name of a step's array."""

_OF_TOKENS = ("input_ids", "positions", "slot_mapping")
_OF_REQUESTS = ("request_rows", "context_lens", "block_tables")


def idle_where(name: str, values: Tensor, idle: Tensor) -> Tensor:
    """One of a step's tensors with the rows that are marked made idle."""
    return values.masked_fill(idle, IDLE[name])


def write_padded(batch: Batch | None, views: Mapping[str, NDArray[Any]]) -> None:
    """Fill arrays with a step, and what is behind it with idle rows.

    Args:
        batch: at most as large as the arrays; None for idle rows only.
        views: some of :meth:`Batch.arrays` by name, and perhaps ``token_rows``.
    """
    for name, view in views.items():
        if name == "cu_seqlens":  # idle requests begin where the step's tokens end
            idle = 0 if batch is None else int(batch.cu_seqlens[-1])
        else:
            idle = IDLE[name]
        array = view[:0] if batch is None else getattr(batch, name)
        count = len(array)
        view[count:] = idle
        if array.ndim == 2:
            view[:count, : array.shape[1]] = array
            view[:count, array.shape[1] :] = idle
        else:
            view[:count] = array


def padded(
    batch: Batch,
    tokens: int,
    requests: int | None = None,
    columns: int | None = None,
    *,
    one_each: bool = False,
) -> Batch:
    """A step with idle rows behind its own; it wants the logits that it did.

    Args:
        batch: perhaps without any request.
        tokens: of the result.
        requests: of the result; None for its own, and for one where it has none, as no kernel takes
            none.
        columns: width of the block table; None for its own.
        one_each: every request of the step has one token, and so shall idle ones.
    """
    rows = max(batch.num_requests, 1) if requests is None else requests
    arrays, width = batch.arrays(), columns or batch.block_tables.shape[1]
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(_OF_TOKENS, (tokens,))
    shapes |= dict.fromkeys(_OF_REQUESTS, (rows,))
    shapes |= {"block_tables": (rows, width), "cu_seqlens": (rows + 1,)}
    views = {name: np.empty(shape, arrays[name].dtype) for name, shape in shapes.items()}
    write_padded(batch, views)
    if one_each:
        views["cu_seqlens"] = np.arange(rows + 1, dtype=np.int32)
    return Batch(**views, logit_rows=batch.logit_rows, tokens_each=batch.tokens_each)


def as_long(batch: Batch, tokens: int) -> Batch:
    """A step without drafts with so many tokens: with as many requests, too, where all decode."""
    each = batch.tokens_each == 1
    return padded(batch, tokens, tokens if each else None, one_each=each)
