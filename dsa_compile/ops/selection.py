"""Deterministic top-k."""

import torch
from torch import Tensor

_INT32_MIN = -(1 << 31)
_NAN = 0x7FC00000  # above the bits of +inf


def best_first(scores: Tensor, topk: int) -> Tensor:
    """Columns of the largest scores, ties to the lower column; a NaN exceeds every number.

    So what a NaN spoiled shows in the result, as in the reference, and does not drop out unseen.

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
    if scores.sum().isnan():  # their sign, and so their place in the order, would be accidental
        bits = torch.where(scores.isnan(), _NAN, bits)
    ordered = torch.where(bits < 0, _INT32_MIN - bits, bits)
    keys = ordered.long().bitwise_left_shift_(32).sub_(torch.arange(width))
    return keys.topk(min(topk, width)).indices
