"""Requirements of the elementwise kernels on their operands."""

import torch
from torch import Tensor

from dsa_compile.ops.library import bad_input

C_TYPES = {torch.bfloat16: "__nv_bfloat16", torch.float32: "float"}
"""The types a kernel can be specialised on, as CUDA spells them."""


def rows_of_16_bytes(op: str, x: Tensor) -> Tensor:
    """``[..., D]`` as ``[N, D]`` whose rows are dense and start at multiples of 16 bytes.

    Copies only what is not dense along its last dimension.

    Raises:
        ValueError: a row starts elsewhere, so that it cannot be read 16 bytes at a time.
    """
    rows = x.reshape(-1, x.shape[-1])
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    require_16_bytes(op, rows)
    return rows


def heads_of_16_bytes(op: str, x: Tensor) -> Tensor:
    """``[T, H, D]`` whose heads are dense and start at multiples of 16 bytes."""
    heads = x if x.stride(2) == 1 else x.contiguous()
    require_16_bytes(op, heads)
    return heads


def require_16_bytes(op: str, x: Tensor) -> None:
    """Refuse a tensor whose vectors, along the last dimension, do not start at 16 bytes."""
    size = x.element_size()
    starts = (stride * size for stride, n in zip(x.stride()[:-1], x.shape, strict=False) if n > 1)
    if x.data_ptr() % 16 or any(start % 16 for start in starts):
        raise bad_input(
            op,
            f"vectors that start at multiples of 16 bytes, not strides {x.stride()} of {size} "
            f"bytes from address {x.data_ptr()} mod 16 = {x.data_ptr() % 16}",
        )


def tables(op: str, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines as rows with one stride."""
    cos, sin = rows_of_16_bytes(op, cos), rows_of_16_bytes(op, sin)
    if cos.stride(0) != sin.stride(0):
        cos, sin = cos.contiguous(), sin.contiguous()
    return cos, sin


def require_constants(op: str, *weights: Tensor) -> None:
    """Refuse weights that a kernel cannot load as they stand, ahead of its other operands."""
    for weight in weights:
        if not weight.is_contiguous():
            raise bad_input(op, f"contiguous weights, not strides {weight.stride()}")
        require_16_bytes(op, weight)


def require_pages(op: str, *caches: Tensor) -> None:
    """Refuse caches that are not contiguous, or whose pages do not start at multiples of 8 bytes,
    the least that is written at once."""
    for cache in caches:
        if not cache.is_contiguous():
            raise bad_input(op, f"contiguous caches, not strides {cache.stride()}")
        if cache.data_ptr() % 16 or cache[:1].nbytes % 8:
            raise bad_input(op, f"pages that start at multiples of 8 bytes, not {cache.shape[1:]}")
