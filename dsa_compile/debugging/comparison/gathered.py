"""One value from those of all ranks: what stands in an unsharded program for a sharded value."""

from typing import Any

import torch
from torch import Tensor

from dsa_compile.debugging.execution.exact import ExactTensor, numbers
from dsa_compile.debugging.execution.ranks import Ranks
from dsa_compile.ir.rank_values import PARTIAL, Part, RankValue


def gathered(value: Any, on_ranks: RankValue) -> Any:
    """The whole value: parts side by side, terms added.

    Args:
        value: of all ranks, :class:`~dsa_compile.debugging.execution.ranks.Ranks` where it differs.
        on_ranks: what it is on each of them.

    Returns:
        A tensor; :class:`Ranks` where ranks differ in what should be alike on all.
    """
    if not isinstance(value, Ranks) or not all(isinstance(each, Tensor) for each in value):
        return value
    parts = [numbers(each) for each in value]
    if on_ranks == PARTIAL:
        whole = torch.stack(parts).sum(0)
    elif isinstance(on_ranks, Part):
        dim = on_ranks.dim
        pieces = [part.chunk(on_ranks.pieces, dim) for part in parts]
        whole = torch.cat([piece for same in zip(*pieces, strict=True) for piece in same], dim)
    else:
        return value
    first = value[0]
    return ExactTensor(whole, first.dtype) if isinstance(first, ExactTensor) else whole
