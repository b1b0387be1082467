"""Deterministic top-k."""

import torch
from torch import Tensor

_INT32_MIN = -(1 << 31)


def best_first(scores: Tensor, topk: int) -> Tensor:
    """Columns of the largest scores, ties to the lower column.

    Sorts one int64 per score: above, its bits made monotonic (two's complement of IEEE's sign and
    magnitude, so that -0.0 and +0.0 are one value); less the column. This is faster than a top-k
    of the floats, whose comparison looks for NaN.

    Args:
        scores: fp32 ``[n, W]``.
        topk: columns wanted.

    Returns:
        int64 ``[n, min(topk, W)]``.
    """
    width = scores.shape[1]
    bits = scores.view(torch.int32)
    ordered = torch.where(bits < 0, _INT32_MIN - bits, bits)
    keys = ordered.long().bitwise_left_shift_(32).sub_(torch.arange(width))
    return keys.topk(min(topk, width)).indices
