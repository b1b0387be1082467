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


def tables(op: str, cos: Tensor, sin: Tensor, tokens: int, width: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines as rows with one stride."""
    if cos.shape != (tokens, width) or sin.shape != cos.shape or sin.dtype is not cos.dtype:
        raise bad_input(
            op,
            f"cos and sin [{tokens}, {width}] of one dtype, not {list(cos.shape)} {cos.dtype} and "
            f"{list(sin.shape)} {sin.dtype}",
        )
    if cos.dtype not in C_TYPES:
        raise bad_input(op, f"tables as bfloat16 or float32, not {cos.dtype}")
    cos, sin = rows_of_16_bytes(op, cos), rows_of_16_bytes(op, sin)
    if cos.stride(0) != sin.stride(0):
        cos, sin = cos.contiguous(), sin.contiguous()
    return cos, sin


def require_constant(op: str, name: str, weight: Tensor, width: int) -> None:
    """Refuse a weight that a kernel cannot load as it stands, ahead of its other operands."""
    if weight.shape != (width,) or weight.dtype not in C_TYPES or not weight.is_contiguous():
        raise bad_input(
            op,
            f"{name} contiguous bfloat16 or float32 [{width}], not {weight.dtype} "
            f"{list(weight.shape)}",
        )
    require_16_bytes(op, weight)


def slots_of(op: str, slot_mapping: Tensor, tokens: int) -> Tensor:
    """Slots of the tokens, dense."""
    if slot_mapping.dtype is not torch.int64 or slot_mapping.shape != (tokens,):
        raise bad_input(
            op,
            f"slot_mapping int64 [{tokens}], not {slot_mapping.dtype} {list(slot_mapping.shape)}",
        )
    return slot_mapping.contiguous()


def require_pages(op: str, cache: Tensor, dtype: torch.dtype, width: int) -> None:
    """Refuse a cache other than ``[num_blocks, block_size, width]`` of a dtype, contiguous, whose
    pages start at multiples of 8 bytes, the least that is written at once."""
    if cache.dtype is not dtype or cache.shape[2:] != (width,) or not cache.is_contiguous():
        raise bad_input(
            op,
            f"a contiguous cache {dtype} [num_blocks, block_size, {width}], not {cache.dtype} "
            f"{list(cache.shape)}",
        )
    if cache.data_ptr() % 16 or cache.shape[1] * width * cache.element_size() % 8:
        raise bad_input(
            op, f"pages that start at multiples of 8 bytes, not {cache.shape[1]} rows of {width}"
        )
