"""Agreement of two values that should be the same: by rows, so that one wrong token is seen."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dsa_compile.verify.execution.exact import numbers
from dsa_compile.verify.execution.ranks import Ranks, on_ranks, parts_of

# A row is not held to more than this share of the usual row's norm: differences of rows that are
# almost zero say little.
_FLOOR = 1e-2


@dataclass(frozen=True)
class Agreement:
    """Two values compared.

    Attributes:
        bitwise: equal to the last bit: -0.0 is not 0.0, and a NaN equals the NaN of its own bits.
        error: the largest norm of a row's difference over the norm of the row; infinite where only
            one of the two is finite, or where whole numbers differ that are no selection.
        typical: the median row's.
        max_abs: largest difference of an element.
        overlap: of rows of a selection, the least share of the chosen that both chose; None for
            other values.
    """

    bitwise: bool = True
    error: float = 0.0
    typical: float = 0.0
    max_abs: float = 0.0
    overlap: float | None = None

    def and_(self, other: "Agreement") -> "Agreement":
        """The worse of two in every respect."""
        overlaps = [o for o in (self.overlap, other.overlap) if o is not None]
        return Agreement(
            self.bitwise and other.bitwise,
            max(self.error, other.error),
            max(self.typical, other.typical),
            max(self.max_abs, other.max_abs),
            min(overlaps, default=None),
        )


def worst(found: Iterable[Agreement]) -> Agreement:
    """The worst in every respect."""
    total = Agreement()
    for each in found:
        total = total.and_(each)
    return total


def compare(theirs: Any, ours: Any, tokens: int, padding: int = 0) -> Agreement:
    """Compare a value with what stands for it.

    Args:
        theirs: the value, a tensor or several; other values must be equal.
        ours: as many elements, perhaps in another shape.
        tokens: size of the dimension whose entries are rows.
        padding: rows at its end that say nothing.
    """
    if isinstance(theirs, Ranks) or isinstance(ours, Ranks):
        return worst(parts_of(on_ranks(compare)(theirs, ours, tokens, padding)))
    if isinstance(theirs, tuple | list) and isinstance(ours, tuple | list):
        pairs = zip(theirs, ours, strict=True)
        return worst(compare(b, a, tokens, padding) for b, a in pairs)
    if not isinstance(theirs, Tensor) or not isinstance(ours, Tensor):
        return Agreement() if theirs == ours else UNLIKE
    if theirs.numel() != ours.numel() or theirs.dtype != ours.dtype:
        return UNLIKE
    theirs, ours = numbers(theirs), numbers(ours)
    theirs, ours = (_rows(v, tokens, padding) for v in (theirs, ours.reshape(theirs.shape)))
    if theirs.is_floating_point():
        return _floats(theirs, ours)
    return _integers(theirs, ours)


UNLIKE = Agreement(False, math.inf, math.inf, math.inf)
"""Values that cannot be compared."""


def same_bits(theirs: Tensor, ours: Tensor) -> bool:
    """Whether two tensors have one dtype, one shape and, element by element, the same bits.

    ``torch.equal`` takes -0.0 for 0.0, and no NaN for itself.
    """
    if theirs.dtype is not ours.dtype or theirs.shape != ours.shape:
        return False
    return torch.equal(_bytes(theirs), _bytes(ours))


def _bytes(value: Tensor) -> Tensor:
    return value.contiguous().view(-1).view(torch.uint8)


def _rows(value: Tensor, tokens: int, padding: int) -> Tensor:
    """[rows, elements], a row for each token if there is such a dimension."""
    at = next((dim for dim, size in enumerate(value.shape) if size == tokens), None)
    if at is None:
        return value.reshape(1, -1)
    return value.movedim(at, 0).reshape(tokens, -1)[: tokens - padding]


def row_errors(theirs: Tensor, ours: Tensor) -> Tensor:
    """The norm of each row's difference over the norm of the row, fp64 ``[T]``; see
    :class:`Agreement`.

    Args:
        theirs: ``[T, elements]``, floating point.
        ours: likewise.
    """
    wide = theirs.double()
    norms = torch.where(wide.isfinite(), wide, 0.0).norm(dim=1)
    usual = norms[norms > 0].median() if bool((norms > 0).any()) else norms.new_ones(())
    errors = _difference(theirs, ours).norm(dim=1) / norms.clamp(min=float(_FLOOR * usual))
    finite: Tensor = errors.nan_to_num(nan=math.inf, posinf=math.inf)
    return finite


def _difference(theirs: Tensor, ours: Tensor) -> Tensor:
    wide, narrow = theirs.double(), ours.double()
    same = (wide == narrow) | (wide.isnan() & narrow.isnan())
    return torch.where(same, 0.0, narrow - wide)


def _floats(theirs: Tensor, ours: Tensor) -> Agreement:
    if same_bits(theirs, ours):
        return Agreement()
    errors = row_errors(theirs, ours)
    largest = _difference(theirs, ours).abs().max().nan_to_num(nan=math.inf, posinf=math.inf)
    return Agreement(False, float(errors.max()), float(errors.median()), float(largest))


def _integers(theirs: Tensor, ours: Tensor) -> Agreement:
    if torch.equal(theirs, ours):
        return Agreement(overlap=1.0 if _is_selection(theirs) else None)
    if not _is_selection(theirs) or not _is_selection(ours):
        return UNLIKE
    shares = []
    for chosen, other in zip(theirs.tolist(), ours.tolist(), strict=True):
        wanted = {entry for entry in chosen if entry >= 0}
        if len(set(other) - {-1}) != sum(entry >= 0 for entry in other):
            return UNLIKE  # a key taken twice
        shares.append(len(wanted & set(other)) / max(len(wanted), 1))
    least = min(shares)
    return Agreement(False, 0.0, 0.0, 0.0, least)


def _is_selection(value: Tensor) -> bool:
    """Rows of keys, as top-k gives them: int32, several a row."""
    return value.dtype is torch.int32 and value.dim() == 2 and value.shape[1] > 1
