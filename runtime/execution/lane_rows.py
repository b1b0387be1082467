"""Rows of a lane's deeper drafts, padded to those that all lanes have."""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from dsa_compile.runtime.execution.draft_rows import DraftedRows
from dsa_compile.runtime.execution.idle_rows import IDLE
from dsa_compile.runtime.execution.step_shape import DEEPER_FROM


def rows_on_lanes(rows: DraftedRows, row: int, options: Tensor) -> DraftedRows:
    """The rows of deeper drafts as every lane has them: of as many requests, and as wide.

    Rows of nobody stand behind the lane's own requests, or alone where those want no such drafts.

    Args:
        rows: of the step, which knows its shape on all lanes.
        row: of the state, that is no request's.
        options: int64 ``[1, 5]``, a record of sampling options for it.

    Returns:
        Rows whose ``places`` mean nothing.
    """
    assert rows.lanes is not None, "of a step on several lanes"
    own = len(rows.rows) if rows.width >= DEEPER_FROM else 0
    nobodys = rows.rows.new_zeros(rows.lanes.drafting - own)
    return replace(
        rows,
        rows=torch.cat([rows.rows[:own], nobodys + row]),
        places=rows.places.new_zeros(rows.lanes.drafting, rows.lanes.width),
        tables=pad(rows.tables[:own], (0, 0, 0, len(nobodys)), value=IDLE["block_tables"]),
        start=torch.cat([rows.start[:own], nobodys]),
        last=torch.cat([rows.last[:own], nobodys]),
        max_new=torch.cat([rows.max_new[:own], nobodys + IDLE["max_new"]]),
        options=torch.cat([rows.options[:own], options.expand(len(nobodys), -1)]),
    )
