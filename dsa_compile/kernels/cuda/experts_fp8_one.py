"""``dsa::experts_fp8`` for one token on Hopper: the whole op in one launch."""

import functools
import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from dsa_compile.kernels.cuda.compiler import Defines
from dsa_compile.kernels.cuda.device import multiprocessors
from dsa_compile.kernels.cuda.experts_fp8_many import INDEX_TYPES
from dsa_compile.kernels.cuda.launch import CudaKernel

_TILE, _DOWN_TILE = 8, 16  # hidden values, and rows of down, of a tile
_SHARED_BYTES = 227 * 1024
_STAGE_BYTES = 16 * 128
_COUNTERS = 4096
"""Counters of arrivals. A call takes the next one, and a captured call keeps its own: calls that
run at once on several streams would have to be so many apart to share one."""


@dataclass(frozen=True)
class Shape:
    """Parameters that the kernel is built with for a geometry.

    Args:
        hidden: H.
        inner: I.
        top_k: experts of a token.
        processors: blocks, one on each multiprocessor.
    """

    hidden: int
    inner: int
    top_k: int
    processors: int

    @property
    def warps(self) -> int:
        """Warps of a block."""
        return self.hidden // (128 * self.warp_blocks)

    @property
    def warp_blocks(self) -> int:
        """Blocks of 128 of gate and up's K of a warp.

        Four leave room for what follows on a multiprocessor: a third of its registers. There has to
        be a warp for each tile of down.
        """
        return 4 if self.hidden % 512 == 0 and self.down_tiles <= self.hidden // 512 else 2

    @property
    def _values(self) -> int:
        """Hidden values that a block has at most."""
        return -(-self.top_k * self.inner // self.processors)

    @property
    def tiles(self) -> int:
        """Tiles of gate and up that a block has at most."""
        return -(-self._values // _TILE)

    @property
    def span(self) -> int:
        """Blocks of 128 hidden values that a block of the grid has values of, at most."""
        return (self._values + 126) // 128 + 1

    @property
    def down_tiles(self) -> int:
        """Tiles of a block's rows of down."""
        return -(-self.hidden // (self.processors * _DOWN_TILE))

    @property
    def stages(self) -> int:
        """Stages of a warp that shared memory holds."""
        return min((_SHARED_BYTES - self._fixed_bytes) // self._stage_bytes, self.most_stages)

    @property
    def _stage_bytes(self) -> int:
        return _STAGE_BYTES * self.warps

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory."""
        return self._fixed_bytes + self.stages * self._stage_bytes

    @property
    def most_stages(self) -> int:
        """Stages of a warp that are of use; more leave less room for what follows."""
        return 2 + self.warp_blocks // 2

    @property
    def _fixed_bytes(self) -> int:
        blocks, parts = self.inner // 128, self.warps // self.down_tiles
        sums = 4 * self.tiles * self.warps * 2 * _TILE
        products = 4 * parts * self.down_tiles * _DOWN_TILE + self.top_k * self.inner
        fixed = max(sums, products) + self.hidden + self.hidden // 32
        fixed += 4 * self.span * 2 * (self.hidden // 128)
        fixed += 4 * (self.top_k * (3 * blocks + 2) + 1) + 64  # the last for alignment
        return fixed

    @property
    def fits(self) -> bool:
        """Whether the kernel takes the geometry."""
        return (
            self.hidden % 256 == 0
            and self.down_tiles <= self.warps <= 32 >= self.top_k
            and self.inner % 128 == 0
            and self.top_k * 2 * (self.inner // 128) <= 32 * self.warps
            and self.stages > 1
        )

    def defines(self, experts: int, index: torch.dtype) -> Defines:
        """Macros of ``experts_fp8_one.cu``."""
        return {
            "HIDDEN": self.hidden,
            "INNER": self.inner,
            "TOP_K": self.top_k,
            "EXPERTS": experts,
            "INDEX": INDEX_TYPES[index],
            "WARP_BLOCKS": self.warp_blocks,
            "TILES": self.tiles,
            "SPAN": self.span,
            "DOWN_TILES": self.down_tiles,
            "STAGES": self.stages,
            "SHARED": self.shared_bytes,
        }


@functools.cache
def _kernel(shape: Shape, experts: int, index: torch.dtype) -> CudaKernel:
    return CudaKernel(
        "experts_fp8_one.cu",
        "experts_one",
        shape.defines(experts, index),
        shared=shape.shared_bytes,
        overlap=True,
    )


_turn = itertools.count()


@functools.cache
def _counters(device: torch.device) -> Tensor:
    """Zeros that stay; to be called before a graph is captured."""
    return torch.zeros(_COUNTERS, dtype=torch.int64, device=device)


def takes_one(hidden: int, inner: int, top_k: int, processors: int) -> bool:
    """Whether :func:`experts_one` takes such operands."""
    return Shape(hidden, inner, top_k, processors).fits


def experts_one(
    x: Tensor,
    x_scale: Tensor,
    weights: Tensor,
    indices: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    down: Tensor,
    down_scale: Tensor,
) -> Tensor:
    """``dsa::experts_fp8`` for one token, of operands checked there; the same bits at every run.

    The outputs of experts are not rounded before they are weighted. Blocks, one on each
    multiprocessor, wait for one another: what holds a multiprocessor meanwhile must end by itself,
    as all of a step does, collectives included, which are launched in its order.
    """
    experts, hidden, inner = down.shape
    top_k = indices.shape[1]
    shape = Shape(hidden, inner, top_k, multiprocessors(x.device))
    values = torch.empty(top_k, inner, dtype=torch.float32, device=x.device)
    out = torch.empty(1, hidden, dtype=torch.bfloat16, device=x.device)
    counters = _counters(x.device)
    _kernel(shape, experts, indices.dtype)(
        (shape.processors, 1, 1),
        32 * shape.warps,
        x,
        x_scale,
        weights,
        indices,
        gate_up,
        gate_up_scale,
        down,
        down_scale,
        values,
        counters[next(_turn) % _COUNTERS :],
        out,
    )
    return out
