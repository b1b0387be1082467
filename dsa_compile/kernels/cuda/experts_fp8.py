"""``dsa::experts_fp8`` on Hopper: both projections of all experts in one persistent launch."""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from dsa_compile.kernels.cuda.compiler import Defines
from dsa_compile.kernels.cuda.device import multiprocessors
from dsa_compile.kernels.cuda.experts_fp8_many import (
    COMBINE_COLUMNS,
    INDEX_TYPES,
    experts_many,
    takes,
)
from dsa_compile.kernels.cuda.experts_fp8_one import experts_one, takes_one
from dsa_compile.kernels.cuda.launch import CudaKernel, tensor_map
from dsa_compile.ops.library import bad_input

_THREADS = 384
_BOX = 128  # rows and bytes of a weight's tile
_QUEUE = 4  # items that a block has claimed and not all its threads have met
PROCESSORS = 132
"""Multiprocessors of an H100 or H200."""


@dataclass(frozen=True)
class Shape:
    """Parameters that the main kernel is built with.

    Args:
        tokens: most rows of a group, which is what one weight tile is multiplied with.
        stages: of the ring in shared memory, each 128 of K.
        blocks: of a multiprocessor.
        claimed: blocks claim items, and ask for 256 bytes of a weight's row at once, two stages'.
    """

    tokens: int
    stages: int
    blocks: int = 1
    claimed: bool = False

    def shared_bytes(self) -> int:
        """Dynamic shared memory; the kernel asserts that it counts the same."""
        stage = 2 * _BOX * _BOX + self.tokens * (_BOX + 4)
        out = min(self.tokens, 72) * 144
        last = 16 if self.blocks == 2 else 0
        queue = _QUEUE * 48 if self.claimed else 0
        return self.stages * (stage + 16) + 2 * out + 3 * self.tokens * 4 + last + queue

    @property
    def l2_promotion(self) -> int:
        """Bytes that L2 fetches for a request of 128. If the next 128 of the row are requested
        right after, 128 is faster than 256: 1,006 µs, not 1,064, at 16 tokens (H200)."""
        return 128 if self.claimed else 256

    def parted(self, inner: int, top_k: int) -> bool:
        """Whether items may share K of gate and up: those of a token leave half of the
        multiprocessors idle, and the shape is that of the fewest tokens."""
        return self.blocks == 2 and 2 * (inner // _BOX * top_k) <= PROCESSORS

    def counters(self, inner: int, top_k: int) -> int:
        """Counters of a group: items of gate and up that are finished, parts of each of them."""
        return 1 + inner // _BOX if self.parted(inner, top_k) else 1

    def defines(self, hidden: int, inner: int, top_k: int) -> Defines:
        """Macros of ``experts_fp8.cu`` for a geometry."""
        return {
            "HIDDEN": hidden,
            "INNER": inner,
            "TOP_K": top_k,
            "TOKENS": self.tokens,
            "STAGES": self.stages,
            "BLOCKS": self.blocks,
            "SHARED": self.shared_bytes(),
            "PARTED": int(self.parted(inner, top_k)),
            "CLAIMED": int(self.claimed),
        }


ONE = Shape(tokens=16, stages=6)
"""Shape for a token whose items of gate and up, 16 an expert, are no more than multiprocessors:
each has one item, and a ring that is twice as deep (eight experts: 91 µs, 94 with FEW; H200)."""
FEW = Shape(tokens=16, stages=3, blocks=2)
"""Shape for few tokens in all other cases. Two blocks share a multiprocessor, so that all items of
gate and up are under way at once (nine experts of a token: 105 µs, 115 with one block, whose last
twelve items wait for a second turn; H200)."""
STREAM = Shape(tokens=32, stages=6, claimed=True)
"""Shape for few rows an expert, where it counts that weights stream and blocks end together."""
WIDE = Shape(tokens=144, stages=4)
"""Shape for more rows an expert, the widest that registers hold."""
_LEAST_BLOCKS = 4
"""Blocks of 128 of K that are worth an item by themselves."""
_PARTS_FILL = 1.1
"""Items of gate and up, for each multiprocessor, up to which they share K."""
_FEW_ROWS, _STREAM_ROWS, _WIDE_ROWS = 0.5, 12, 48
"""Mean rows of an expert up to which ONE or FEW, STREAM and WIDE are taken; ONE and FEW only while
all items of gate and up are under way at once. Beyond the last, rows are ordered first, in a
geometry that :mod:`~dsa_compile.kernels.cuda.experts_fp8_many` takes."""


@dataclass(frozen=True)
class _Kernels:
    plan: CudaKernel
    main: CudaKernel
    combine: CudaKernel


@functools.cache
def _kernels(
    experts: int, hidden: int, inner: int, top_k: int, index: torch.dtype, shape: Shape
) -> _Kernels:
    common: Defines = {"INDEX": INDEX_TYPES[index], "EXPERTS": experts}
    row: Defines = {"HIDDEN": hidden, "TOP_K": top_k}
    return _Kernels(
        CudaKernel(
            "experts_fp8_plan.cu",
            "experts_plan",
            {**common, "TOKENS": shape.tokens, "COUNTERS": shape.counters(inner, top_k)},
            overlap=True,
        ),
        CudaKernel(
            "experts_fp8.cu",
            "experts",
            shape.defines(hidden, inner, top_k),
            shared=shape.shared_bytes(),
            overlap=True,
        ),
        CudaKernel("experts_fp8_combine.cu", "experts_combine", row, overlap=True),
    )


def parts_of_k(groups: int, tiles: int, blocks: int, processors: int) -> int:
    """Items that share K of gate and up: as many as have, but for a tenth, a multiprocessor each.

    Args:
        groups: at most.
        tiles: of gate and up of each, 128 rows of both.
        blocks: of 128 of K; every part has equally many, and at least :data:`_LEAST_BLOCKS`.
        processors: of the device.
    """
    most = min(int(_PARTS_FILL * processors) // (groups * tiles), blocks // _LEAST_BLOCKS)
    return max((parts for parts in range(1, most + 1) if blocks % parts == 0), default=1)


def _shape(pairs: int, experts: int, inner: int, top_k: int, processors: int) -> Shape:
    if pairs > _STREAM_ROWS * experts:
        return WIDE
    items = pairs * (inner // _BOX)  # of gate and up, if no two pairs have the same expert
    if pairs > _FEW_ROWS * experts or items > FEW.blocks * processors:
        return STREAM
    return ONE if items <= processors and not FEW.parted(inner, top_k) else FEW


@functools.cache
def _in_one_launch(hidden: int, inner: int, top_k: int, processors: int) -> bool:
    """Whether one token has a kernel of its own: where its items are too few for multiprocessors.

    Its sums have another order. Elsewhere a token has the same bits among however many others, and
    wide experts take no less time in it (2,048: 144 µs, 141 in three launches; H100).
    """
    if not takes_one(hidden, inner, top_k, processors):
        return False
    return parts_of_k(top_k, inner // _BOX, hidden // _BOX, processors) > 1


def experts_fp8(
    x: Tensor,
    x_scale: Tensor,
    weights: Tensor,
    indices: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    down: Tensor,
    down_scale: Tensor,
) -> Tensor:
    """See :func:`dsa_compile.ops.experts_fp8.experts_fp8`; the same bits at every run.

    An expert's output is rounded to bf16 before it is weighted, unless one token's narrow experts
    run in one launch. Up to 1,024 experts, H a multiple of 256.

    Raises:
        ValueError: operands do not fit together or are not supported.
    """
    operands = (x, x_scale, weights, indices, gate_up, gate_up_scale, down, down_scale)
    if not all(t.is_contiguous() for t in operands):
        raise bad_input("experts_fp8", "contiguous tensors")
    experts, hidden, inner = down.shape
    tokens, top_k = indices.shape
    pairs = tokens * top_k
    processors = multiprocessors(x.device)
    if tokens == 1 and _in_one_launch(hidden, inner, top_k, processors):
        return experts_one(x, x_scale, weights, indices, gate_up, gate_up_scale, down, down_scale)
    if pairs > _WIDE_ROWS * experts and takes(hidden, inner):
        return experts_many(x, x_scale, weights, indices, gate_up, gate_up_scale, down, down_scale)
    out = torch.empty(tokens, hidden, dtype=torch.bfloat16, device=x.device)
    if pairs == 0:
        return out.zero_()
    shape = _shape(pairs, experts, inner, top_k, processors)
    kernels = _kernels(experts, hidden, inner, top_k, indices.dtype, shape)
    hit_most = min(pairs, experts)
    groups_most = hit_most + (pairs - hit_most) // shape.tokens

    def empty(*sizes: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(sizes, dtype=dtype, device=x.device)

    pair_of, row_of, groups = empty(pairs), empty(pairs), empty(groups_most, 4)
    counters, tiles = shape.counters(inner, top_k), inner // _BOX
    count, finished = empty(2), empty(groups_most, counters)
    shared: tuple[Tensor, int] | tuple[()] = ()
    if shape.parted(inner, top_k):
        parts = parts_of_k(groups_most, tiles, hidden // _BOX, processors)
        sums = groups_most * tiles * parts * shape.tokens * 2 * _BOX if parts > 1 else 0
        shared = empty(sums, dtype=torch.float32), parts
    inner_values = empty(pairs, inner, dtype=torch.uint8)
    inner_scale = empty(pairs, inner // _BOX, dtype=torch.float32)
    outputs = empty(pairs, hidden, dtype=torch.bfloat16)
    kernels.plan((1, 1, 1), 1024, indices, pairs, pair_of, row_of, groups, count, finished)
    kernels.main(
        (processors * shape.blocks, 1, 1),
        _THREADS,
        tensor_map(gate_up.view(-1, hidden), (_BOX, _BOX), l2_promotion=shape.l2_promotion),
        tensor_map(down.view(-1, inner), (_BOX, _BOX), l2_promotion=shape.l2_promotion),
        x,
        x_scale,
        gate_up_scale,
        down_scale,
        pair_of,
        groups,
        count,
        finished,
        inner_values,
        inner_scale,
        outputs,
        *shared,
    )
    columns = -(-hidden // COMBINE_COLUMNS)
    kernels.combine((tokens, columns, 1), 128, outputs, weights, row_of, out)
    return out
