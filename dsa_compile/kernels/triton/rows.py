"""Tensors as rows, for kernels that work row by row."""

from torch import Tensor


def as_rows(x: Tensor) -> Tensor:
    """``[..., D]`` as ``[N, D]`` whose rows are dense but may lie apart; copies only if it must.

    A slice of a merged projection stays a view, so its rows' stride is the projection's width.
    """
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()
