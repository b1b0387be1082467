"""Selections that layers hand on, in the form that the layer which takes them attends to.

As exported, a layer selects positions, of short sequences also of keys that are not visible yet:
its mask hides those. The ops select positions or, where keys are in caches, rows of a request's
pages, with -1 where there are no more. Half-way through a pass that changes this, some layers
select the one and attend to the other.
"""

from collections.abc import Mapping
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from dsa_compile.ir.match import calls
from dsa_compile.ir.region import Region, Role
from dsa_compile.ops import Family, Form, ops_of
from dsa_compile.verify.execution.ranks import on_ranks

SELECTED = "selected"


class _Selection(Enum):
    ANY = "positions, visible or not"
    VISIBLE = "visible positions"
    ROWS = "rows of the cache"


def _selection(region: Region) -> _Selection:
    """Form in which a layer selects keys and attends to them."""
    by_heads = ops_of(Family.PROMPT_ATTENTION, Form.FLAT)  # which takes what is selected as given
    if any(calls(region.graph, *ops_of(Family.ATTENTION, Form.FLAT), *by_heads)):
        return _Selection.ROWS
    dense = any(calls(region.graph, *ops_of(Family.ATTENTION, Form.DENSE)))
    return _Selection.VISIBLE if dense else _Selection.ANY


def convert_selection(
    chosen: Tensor, made_by: Region, taken_by: Region, batch: Mapping[str, Tensor], block_size: int
) -> Tensor:
    """Convert a selection of one layer to the form that another takes; unchanged if in that form.

    Args:
        chosen: int32 [T, K], or [1, S, K] before tokens are flat.
        made_by: the layer that selected.
        taken_by: the layer that attends.
        batch: of the step.
        block_size: rows of a page.
    """
    source, target = _selection(made_by), _selection(taken_by)
    if source is target:
        return chosen

    def turn(selected: Tensor) -> Tensor:
        rows = _visible(selected.flatten(0, -2), source, batch, block_size)
        if target is _Selection.ANY:
            rows = _filled(rows, batch)
        elif target is _Selection.ROWS:
            rows = _rows(rows, batch, block_size)
        return rows.view(*selected.shape[:-1], -1)

    turned: Tensor = on_ranks(turn)(chosen)
    return turned


def comparable_value(
    region: Region, name: str, value: Tensor, batch: Mapping[str, Tensor], block_size: int
) -> Tensor:
    """A value of a node; of the selection that the layer hands on, what all its forms agree in."""
    handed = [n.name for n in region.inputs_of(Role.VALUE) if n.meta["key"] == SELECTED]
    if SELECTED in region.outputs:
        results: Any = region.graph.output_node().args[0]
        handed.append(results[region.outputs.index(SELECTED)].name)
    return visible_positions(value, region, batch, block_size) if name in handed else value


def visible_positions(
    chosen: Tensor, made_by: Region, batch: Mapping[str, Tensor], block_size: int
) -> Tensor:
    """The visible positions selected, highest first and then -1.

    Args:
        chosen: int32 [T, K], or [1, S, K] before tokens are flat.
        made_by: the layer that selected.
        batch: of the step.
        block_size: rows of a page.

    Returns:
        int32 [T, the highest position + 1].
    """
    width = int(batch["positions"].max()) + 1

    def normal(selected: Tensor) -> Tensor:
        rows = _visible(selected.flatten(0, -2), _selection(made_by), batch, block_size)
        rows = rows.sort(dim=1, descending=True).values[:, :width]
        return torch.nn.functional.pad(rows, (0, width - rows.shape[1]), value=-1)

    found: Tensor = on_ranks(normal)(chosen)
    return found


def _visible(
    rows: Tensor, form: _Selection, batch: Mapping[str, Tensor], block_size: int
) -> Tensor:
    if form is _Selection.ROWS:
        return _positions(rows, batch, block_size)
    if form is _Selection.VISIBLE:
        return rows
    return torch.where(rows <= batch["positions"].view(-1, 1), rows, -1)


def _filled(rows: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """Positions that are not visible in place of -1."""
    now = batch["positions"].view(-1, 1)
    rows = rows[:, : len(rows)]
    unseen = now + (rows < 0).cumsum(1)
    return torch.where(rows < 0, unseen, rows).int()


def _requests(count: int, batch: Mapping[str, Tensor]) -> Tensor:
    """The request of each row, int64 [count]; that of padding is the last."""
    ends = batch["cu_seqlens"][1:].long()
    return torch.searchsorted(ends, torch.arange(count), right=True).clamp(max=len(ends) - 1)


def _rows(chosen: Tensor, batch: Mapping[str, Tensor], block_size: int) -> Tensor:
    tables = batch["block_tables"].long()[_requests(len(chosen), batch)]
    at = chosen.long().clamp(min=0, max=tables.shape[1] * block_size - 1)
    rows = tables.gather(1, at // block_size) * block_size + at % block_size
    return torch.where(chosen < 0, -1, rows).int()


def _positions(chosen: Tensor, batch: Mapping[str, Tensor], block_size: int) -> Tensor:
    tables = batch["block_tables"].long()
    blocks = int(max(tables.max(), chosen.max() // block_size)) + 1
    # Where a table is not filled it is -1: that entry is written to a column of its own.
    place = torch.full((len(tables), blocks + 1), -1)
    pages = torch.arange(tables.shape[1]).expand_as(tables)
    place.scatter_(1, torch.where(tables < 0, blocks, tables), pages)
    at = chosen.long().clamp(min=0)
    page = place[_requests(len(chosen), batch)].gather(1, at // block_size)
    known = (chosen >= 0) & (page >= 0)
    return torch.where(known, page * block_size + at % block_size, -1).int()
