"""Device functions of the indexer: RoPE, Hadamard transform and quantisation of its vectors.

A vector of D values is turned by a product with the D x D matrix of signs on the tensor cores,
exact in bf16.
"""

import triton
import triton.language as tl

from dsa_compile.kernels.triton.e4m3 import block_scale, reciprocal


@triton.jit
def partners(D: tl.constexpr, ROPE: tl.constexpr, INTERLEAVED: tl.constexpr) -> tl.tensor:
    """Column that each column is rotated with, ``[D]``; its own if it is not rotated."""
    column = tl.arange(0, D)
    if INTERLEAVED:
        other = column ^ 1
    else:
        other = tl.where(column < ROPE // 2, column + ROPE // 2, column - ROPE // 2)
    return tl.where(column < ROPE, other, column)


@triton.jit
def rotate(
    x: tl.tensor,
    partner: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    valid: tl.tensor,
    D: tl.constexpr,
    ROPE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
) -> tl.tensor:
    """The first ``ROPE`` of D values rotated, the others as they are; fp32 ``[ROWS, D]``.

    Pairs stay where they are. ``partner`` has each value's other one, ``cos`` and ``sin`` are
    pointers ``[ROWS, 1]`` to the rows of their tables.
    """
    column = tl.arange(0, D)[None, :]
    turns = column < ROPE
    if INTERLEAVED:
        angle, first = column // 2, column % 2 == 0
    else:
        angle, first = column % (ROPE // 2), column < ROPE // 2
    c = tl.load(cos + angle, valid & turns, 0.0).to(tl.float32)
    s = tl.load(sin + angle, valid & turns, 0.0).to(tl.float32)
    rotated = tl.where(first, x * c - partner * s, x * c + partner * s)
    return tl.where(turns, rotated, x)


@triton.jit
def transform(x: tl.tensor, D: tl.constexpr) -> tl.tensor:
    """Normalised Hadamard transform of 16-bit rows ``[ROWS, D]``; fp32, rounded to their dtype."""
    turned = tl.dot(x, _signs(D, x.dtype))
    return (turned * (D**-0.5)).to(x.dtype).to(tl.float32)


@triton.jit
def _signs(D: tl.constexpr, dtype: tl.constexpr) -> tl.tensor:
    """The Sylvester-Hadamard matrix: -1 to the number of bits that row and column share."""
    shared = tl.arange(0, D)[:, None] & tl.arange(0, D)[None, :]
    shared ^= shared >> 4
    shared ^= shared >> 2
    shared ^= shared >> 1
    return (1 - 2 * (shared & 1)).to(tl.float32).to(dtype)


@triton.jit
def quantize_rows(x: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """e4m3 ``[ROWS, D]`` under a power-of-two scale for each row, and the scales ``[ROWS]``."""
    scale = block_scale(tl.max(tl.abs(x), 1), True)
    return (x * reciprocal(scale)[:, None]).to(tl.float8e4nv), scale
