"""FlashInfer: top-k of ragged rows. Its kernels are compiled on the machine at first use."""

import importlib
from typing import Any

import torch
from torch import Tensor


def _library() -> Any:
    return importlib.import_module("flashinfer")


def topk(
    scores: Tensor,
    ends: Tensor,
    k: int,
    *,
    offsets: Tensor | None = None,
    deterministic: bool = False,
) -> Tensor:
    """Counterpart of ``kernels.cuda.topk.topk`` for rows that start at column 0.

    Args:
        scores: fp32 ``[T, W]``.
        ends: int32 ``[T]``.
        k: columns wanted.
        offsets: int32 ``[T]`` of zeros, to save making them.
        deterministic: same bits in every run.

    Returns:
        int32 ``[T, k]``: columns in no particular order, then -1.
    """
    if offsets is None:
        offsets = torch.zeros_like(ends)
    columns: Tensor = _library().top_k_ragged_transform(
        scores, offsets, ends, k, deterministic=deterministic
    )
    return columns
