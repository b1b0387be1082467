"""Block-scaled FP8 projections of many tokens (``src/gemm_fp8_large.cu``)."""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from dsa_compile.kernels.cuda.device import multiprocessors
from dsa_compile.kernels.cuda.launch import CudaKernel, tensor_map
from dsa_compile.ops.quantize import BLOCK

COLUMNS = 128
"""Columns of the output that a block computes at a time."""


@dataclass(frozen=True)
class Tile:
    """Tile of the output that a block computes at a time.

    Attributes:
        groups: warpgroups that multiply, 2 or 3.
        subtiles: of 64 tokens, of each of them; 1 or 2.
        stages: copies in flight.
    """

    groups: int
    subtiles: int
    stages: int

    @property
    def tokens(self) -> int:
        """Rows of the output; its columns are :data:`COLUMNS`."""
        return 64 * self.groups * self.subtiles

    @property
    def threads(self) -> int:
        """Threads of a block: those that multiply and a warpgroup for the thread that copies."""
        return 128 * (self.groups + 1)

    @property
    def shared(self) -> int:
        """Bytes of shared memory; as laid out in the kernel."""
        slot = (self.tokens + COLUMNS) * BLOCK
        more = max(self.tokens * COLUMNS * 2 - slot, 0)
        return 1024 + self.stages * (slot + 4 * self.tokens + 128 + 16) + more


TILES = (Tile(2, 2, 4), Tile(3, 1, 5), Tile(2, 1, 6))


@functools.cache
def kernel(tile: Tile) -> CudaKernel:
    """The kernel of a tile."""
    return CudaKernel(
        "gemm_fp8_large.cu",
        "linear_large",
        {"GROUPS": tile.groups, "SUBTILES": tile.subtiles, "STAGES": tile.stages},
        shared=tile.shared,
        cluster=(2, 1, 1),
        overlap=True,
    )


TRANSPOSE = CudaKernel(
    "gemm_fp8_large.cu",
    "transpose_scales",
    {"GROUPS": 2, "SUBTILES": 2, "STAGES": 4},
    overlap=True,
)


def choose(tokens: int, rows: int, blocks: int, processors: int) -> Tile:
    """The tile for ``[tokens, 128 · blocks] x [rows, 128 · blocks]`` that should end first."""

    def cycles(tile: Tile) -> float:
        # Shared memory moves 128 bytes a cycle: a stage in, and for every 64 tokens their values
        # and the weights' out. Three warpgroups cover each other's additions better than two do
        # (measured). The rest is what a tile costs at its end.
        subtiles = tile.groups * tile.subtiles
        stage = tile.tokens + COLUMNS + subtiles * (64 + COLUMNS)
        covered = {(2, 2): 1.0, (3, 1): 0.92, (2, 1): 1.07}[tile.groups, tile.subtiles]
        rounds = -(-2 * _pairs(tile, tokens, rows) // (processors & ~1))
        return rounds * (blocks * stage * covered + 500 * subtiles)

    return min(TILES, key=cycles)


def _pairs(tile: Tile, tokens: int, rows: int) -> int:
    """Tiles, by pairs of neighbouring columns."""
    return -(-tokens // tile.tokens) * -(-rows // (2 * COLUMNS))


def linear_large(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, tile: Tile | None = None
) -> Tensor:
    """``dsa::linear_fp8`` for many tokens.

    Args:
        x: e4m3 ``[T, K]``, T at least 1; all operands contiguous.
        x_scale: fp32 ``[T, K/128]``, contiguous or with columns a multiple of 4 apart; the
            former costs a launch that transposes it.
        weight: e4m3 ``[N, K]``, N a multiple of 8.
        weight_scale: fp32 ``[ceil(N/128), K/128]``.
        tile: if not the chosen one.

    Returns:
        bf16 ``[T, N]``.
    """
    tokens, k = x.shape
    rows = weight.shape[0]
    processors = multiprocessors(x.device)
    tile = tile or choose(tokens, rows, k // BLOCK, processors)
    out = torch.empty(tokens, rows, dtype=torch.bfloat16, device=x.device)
    by_column = scales_by_column(x_scale)
    kernel(tile)(
        (min(2 * _pairs(tile, tokens, rows), processors & ~1), 1, 1),
        tile.threads,
        tensor_map(weight, (COLUMNS, BLOCK), l2_promotion=256),
        tensor_map(x, (tile.tokens // 2, BLOCK), l2_promotion=256),
        tensor_map(by_column.t(), (1, tile.tokens), swizzle=0),
        tensor_map(out, (16, 64)),
        weight_scale,
        tokens,
        rows,
        k // BLOCK,
    )
    return out


def scales_by_column(x_scale: Tensor) -> Tensor:
    """Scales, fp32 ``[T, K/128]``, with those of a block of K side by side.

    Args:
        x_scale: laid out anyhow; as the result if nothing is to be done.

    Returns:
        Strides ``(1, S)``, S a multiple of 4.
    """
    tokens, blocks = x_scale.shape
    if x_scale.stride(0) == 1 and not x_scale.stride(1) % 4 and not x_scale.data_ptr() % 16:
        return x_scale
    x_scale = x_scale.contiguous()
    stride = -(-tokens // 4) * 4
    out = torch.empty(blocks, stride, dtype=torch.float32, device=x_scale.device)
    grid = -(-tokens // 32), -(-blocks // 32), 1
    TRANSPOSE(grid, 256, x_scale, out, tokens, blocks, stride)
    return out.t()[:tokens]
