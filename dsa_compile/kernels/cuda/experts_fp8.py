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
from dsa_compile.kernels.cuda.launch import CudaKernel, tensor_map
from dsa_compile.ops.experts_fp8 import check_experts_fp8
from dsa_compile.ops.library import bad_input
from dsa_compile.ops.quantize import require_whole_blocks

_THREADS = 384
_BOX = 128  # rows and bytes of a weight's tile


@dataclass(frozen=True)
class Shape:
    """How the main kernel is built.

    Args:
        tokens: most rows of a group, which is what one weight tile is multiplied with.
        stages: of the ring in shared memory, each 128 of K.
        blocks: of a multiprocessor.
    """

    tokens: int
    stages: int
    blocks: int = 1

    def shared_bytes(self) -> int:
        """Dynamic shared memory; the kernel asserts that it counts the same."""
        stage = 2 * _BOX * _BOX + self.tokens * (_BOX + 4)
        out = min(self.tokens, 72) * 144
        return self.stages * (stage + 16) + 2 * out + 3 * self.tokens * 4

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
        }


FEW = Shape(tokens=16, stages=3, blocks=2)
"""For the fewest. Two blocks share a multiprocessor: a token's items of gate and up, 16 an expert,
are then all under way at once, whatever the number of experts (nine of them: 105 µs, 115 with one
block, whose last twelve items wait for a second turn; H200)."""
NARROW = Shape(tokens=64, stages=5)
"""For few rows an expert: what counts is to stream weights. A shared expert has a row for every
token: at 128 tokens groups of 64 take 2,553 µs, of 32 2,578, of 16 2,602 (H200)."""
WIDE = Shape(tokens=144, stages=4)
"""For more, the widest that registers hold."""
_FEW_ROWS, _NARROW_ROWS, _WIDE_ROWS = 0.5, 12, 48
"""Mean rows of an expert up to which FEW, NARROW and WIDE are taken; beyond, rows are ordered
first (:mod:`~dsa_compile.kernels.cuda.experts_fp8_many`)."""


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
            {**common, "TOKENS": shape.tokens},
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


def _shape(pairs: int, experts: int) -> Shape:
    if pairs > _NARROW_ROWS * experts:
        return WIDE
    return NARROW if pairs > _FEW_ROWS * experts else FEW


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

    An expert's output is rounded to bf16 before it is weighted. Up to 1,024 experts, H a multiple
    of 256.

    Raises:
        ValueError: operands do not fit together or are not supported.
    """
    check_experts_fp8(x, x_scale, weights, indices, gate_up, gate_up_scale, down, down_scale)
    require_whole_blocks("experts_fp8", H=x.shape[1], I=down.shape[2])
    operands = (x, x_scale, weights, indices, gate_up, gate_up_scale, down, down_scale)
    if not all(t.is_contiguous() for t in operands):
        raise bad_input("experts_fp8", "contiguous tensors")
    experts, hidden, inner = down.shape
    if hidden % 256 or experts > 1024:
        raise bad_input(
            "experts_fp8",
            f"H a multiple of 256 and at most 1024 experts on CUDA, not {hidden} and {experts}",
        )
    tokens, top_k = indices.shape
    pairs = tokens * top_k
    if pairs > _WIDE_ROWS * experts and takes(hidden, inner):
        return experts_many(x, x_scale, weights, indices, gate_up, gate_up_scale, down, down_scale)
    out = torch.empty(tokens, hidden, dtype=torch.bfloat16, device=x.device)
    if pairs == 0:
        return out.zero_()
    shape = _shape(pairs, experts)
    kernels = _kernels(experts, hidden, inner, top_k, indices.dtype, shape)
    groups_most = min(pairs, experts) + pairs // shape.tokens

    def empty(*sizes: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(sizes, dtype=dtype, device=x.device)

    pair_of, row_of, groups = empty(pairs), empty(pairs), empty(groups_most, 4)
    count, finished = empty(1), empty(groups_most)
    inner_values = empty(pairs, inner, dtype=torch.uint8)
    inner_scale = empty(pairs, inner // _BOX, dtype=torch.float32)
    outputs = empty(pairs, hidden, dtype=torch.bfloat16)
    kernels.plan((1, 1, 1), 1024, indices, pairs, pair_of, row_of, groups, count, finished)
    kernels.main(
        (multiprocessors(x.device) * shape.blocks, 1, 1),
        _THREADS,
        tensor_map(gate_up.view(-1, hidden), (_BOX, _BOX), l2_promotion=256),
        tensor_map(down.view(-1, inner), (_BOX, _BOX), l2_promotion=256),
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
    )
    columns = -(-hidden // COMBINE_COLUMNS)
    kernels.combine((tokens, columns, 1), 128, outputs, weights, row_of, out)
    return out
