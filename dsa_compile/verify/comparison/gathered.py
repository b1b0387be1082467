"""One value from those of all ranks: what stands in an unsharded program for a sharded value."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dsa_compile.facts.layout import DP, Layout
from dsa_compile.facts.placements import PARTIAL, Placement, Split
from dsa_compile.verify.execution.exact import ExactTensor, numbers
from dsa_compile.verify.execution.ranks import meet, parts_of


def gathered(value: Any, on_axes: Mapping[str, Placement], layout: Layout) -> Any:
    """The whole value: parts side by side, terms added, along one axis after the other.

    Args:
        value: of all ranks, :class:`~dsa_compile.verify.execution.ranks.Ranks` where it differs.
        on_axes: what it is on each rank, by axis.
        layout: of the ranks.

    Returns:
        A tensor; :class:`~dsa_compile.verify.execution.ranks.Ranks` of lanes, and where ranks
        differ in what should be alike on all.
    """
    for axis, share in on_axes.items():
        if share == PARTIAL or isinstance(share, Split):
            value = meet(partial(_whole, share), value, axis, layout.along(axis))
    return value


def _whole(share: Placement, values: Sequence[Any]) -> Sequence[Any]:
    """The whole value, for each of the ranks that share it."""
    if not all(isinstance(each, Tensor) for each in values):
        return values
    first, parts = values[0], [numbers(each) for each in values]
    if isinstance(share, Split):
        pieces = [part.chunk(share.pieces, share.dim) for part in parts]
        whole = torch.cat([p for same in zip(*pieces, strict=True) for p in same], share.dim)
    else:
        whole = torch.stack(parts).sum(0)
    made = ExactTensor(whole, first.dtype) if isinstance(first, ExactTensor) else whole
    return [made] * len(values)


def rows_of_lanes(value: Any, like: Tensor, lanes: int) -> Any:
    """Split a value with the rows of all lanes, which are given the same, into those of each lane.

    Args:
        value: as :func:`gathered` returns it.
        like: the value of one rank.
        lanes: how many.

    Returns:
        :class:`~dsa_compile.verify.execution.ranks.Ranks` along ``dp``; the value itself where
        it has the rows of one lane.
    """
    rows = lanes * len(like) if like.dim() else 0
    if lanes == 1 or any(not each.dim() or len(each) != rows for each in parts_of(value)):
        return value
    return meet(
        lambda values: [each.chunk(lanes)[lane] for lane, each in enumerate(values)],
        value, DP, lanes,
    )  # fmt: skip
