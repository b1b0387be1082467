"""Device functions of the indexer: RoPE, Hadamard transform and quantisation of 128-wide vectors.

A vector lives in four tiles of 32 columns, so that the transform H128 = H4 (x) H32 is a small
product with a matrix of signs on the tensor cores for each tile, exact in bf16, and two levels of
additions between tiles, which stay within a thread.
"""

import triton
import triton.language as tl

from dsa_compile.kernels.triton.e4m3 import block_scale, reciprocal
from dsa_compile.kernels.triton.rope import deinterleave

TILE = tl.constexpr(32)
INVERSE_ROOT = tl.constexpr(128.0**-0.5)


@triton.jit
def signs(dtype: tl.constexpr) -> tl.tensor:
    """The 32 x 32 Sylvester-Hadamard matrix: -1 to the number of bits that row and column share."""
    shared = tl.arange(0, TILE)[:, None] & tl.arange(0, TILE)[None, :]
    shared ^= shared >> 4
    shared ^= shared >> 2
    shared ^= shared >> 1
    return (1 - 2 * (shared & 1)).to(tl.float32).to(dtype)


@triton.jit
def rotate_neighbours(
    x: tl.tensor, cos: tl.tensor, sin: tl.tensor, ROWS: tl.constexpr
) -> tl.tensor:
    """Pairs ``x[2i], x[2i + 1]`` of fp32 ``[ROWS, 32]``, staying where they are."""
    first, second = deinterleave(x, ROWS, TILE // 2)
    pairs = tl.join(first * cos - second * sin, second * cos + first * sin)
    return tl.reshape(pairs, (ROWS, TILE))


@triton.jit
def rotate(
    a: tl.tensor,
    b: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    valid: tl.tensor,
    ROWS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
) -> tl.tensor:
    """The first 64 values, two fp32 tiles.

    ``cos`` and ``sin`` are pointers ``[ROWS or 1, 1]`` to the rows of their tables.
    """
    if INTERLEAVED:
        column = tl.arange(0, TILE // 2)[None, :]
        c = tl.load(cos + column, valid, 0.0).to(tl.float32)
        s = tl.load(sin + column, valid, 0.0).to(tl.float32)
        low = rotate_neighbours(a, c, s, ROWS)
        c = tl.load(cos + TILE // 2 + column, valid, 0.0).to(tl.float32)
        s = tl.load(sin + TILE // 2 + column, valid, 0.0).to(tl.float32)
        high = rotate_neighbours(b, c, s, ROWS)
    else:
        column = tl.arange(0, TILE)[None, :]
        c = tl.load(cos + column, valid, 0.0).to(tl.float32)
        s = tl.load(sin + column, valid, 0.0).to(tl.float32)
        low = a * c - b * s
        high = b * c + a * s
    return low, high


@triton.jit
def transform(
    a: tl.tensor, b: tl.tensor, c: tl.tensor, d: tl.tensor, dtype: tl.constexpr
) -> tl.tensor:
    """Normalised Hadamard transform of 16-bit tiles ``[ROWS, 32]``; fp32, rounded to ``dtype``."""
    matrix = signs(dtype)
    a, b, c, d = tl.dot(a, matrix), tl.dot(b, matrix), tl.dot(c, matrix), tl.dot(d, matrix)
    even, odd = a + b, a - b
    a, b = even + (c + d), odd + (c - d)
    c, d = even - (c + d), odd - (c - d)
    return _round(a, dtype), _round(b, dtype), _round(c, dtype), _round(d, dtype)


@triton.jit
def _round(x: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    return (x * INVERSE_ROOT).to(dtype).to(tl.float32)


@triton.jit
def common_scale(a: tl.tensor, b: tl.tensor, c: tl.tensor, d: tl.tensor) -> tl.tensor:
    """The power-of-two scale of each row ``[ROWS]`` over its four tiles."""
    largest = tl.maximum(tl.maximum(tl.abs(a), tl.abs(b)), tl.maximum(tl.abs(c), tl.abs(d)))
    return block_scale(tl.max(largest, 1), True)


@triton.jit
def store_tiles(
    target: tl.tensor,
    a: tl.tensor,
    b: tl.tensor,
    c: tl.tensor,
    d: tl.tensor,
    scale: tl.tensor,
    valid: tl.tensor,
) -> None:
    """Quantise and store; ``target`` points at the first column of every row, ``[ROWS, 1]``."""
    inverse = reciprocal(scale)[:, None]
    column = target + tl.arange(0, TILE)[None, :]
    tl.store(column, (a * inverse).to(tl.float8e4nv), valid)
    tl.store(column + TILE, (b * inverse).to(tl.float8e4nv), valid)
    tl.store(column + 2 * TILE, (c * inverse).to(tl.float8e4nv), valid)
    tl.store(column + 3 * TILE, (d * inverse).to(tl.float8e4nv), valid)
