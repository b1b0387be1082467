"""Rows of a layer that hang on a choice between near equals, of experts or of keys.

A router or an indexer takes the larger of two scores that differ by less than fp32 resolves. Which
one that is, the order of a sum decides, and on another processor it is the other one. Such a row
says nothing about a layer. A little noise in the layer's input tells it from others: it turns the
choice, and changes the row a hundred times as much as the noise itself.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from dsa_compile.verify.comparison.agreement import row_errors
from dsa_compile.verify.execution.exact import ExactTensor, numbers

NOISE = 1e-5
"""Noise relative to the input's values: far above what fp32 rounds, far below what checks allow."""

TRIALS = 8
"""A choice that ties turns in half of them: one in 256 is missed."""

_MOST = 1 / 16  # of all rows: where more differ, or are unsteady, it is not for want of luck


def noisy(x: Tensor, seed: int) -> Tensor:
    """An exact tensor of the same dtype with noise of :data:`NOISE` in each value."""
    wide = numbers(x)
    noise = torch.randn(wide.shape, generator=torch.Generator().manual_seed(seed))
    return ExactTensor(wide * (1 + NOISE * noise.to(wide.dtype)), x.dtype)


def steady_rows(made: Tensor, again: Iterable[Tensor], limit: float) -> Tensor:
    """Rows that noise moves by no more than a limit, bool ``[T]``; all, if too many are unsteady.

    Args:
        made: what a layer returns, ``[T, …]``.
        again: the same of inputs with noise.
        limit: relative, of a row's norm.
    """
    rows = numbers(made).flatten(1)
    steady = torch.ones(len(rows), dtype=torch.bool)
    for other in again:
        steady &= row_errors(rows, numbers(other).flatten(1)) <= limit
    return steady if is_few(~steady) else torch.ones_like(steady)


def is_few(rows: Tensor) -> bool:
    """Whether so many of all rows, bool ``[T]``, may be left out."""
    return int(rows.sum()) <= max(_MOST * len(rows), 1)
