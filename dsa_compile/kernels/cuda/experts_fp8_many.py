"""FP8 experts of many rows each: rows ordered by expert, then one persistent launch."""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from dsa_compile.kernels.cuda.compiler import Defines
from dsa_compile.kernels.cuda.launch import CudaKernel, tensor_map

INDEX_TYPES = {torch.int64: "long long", torch.int32: "int"}
THREADS = 384
COMBINE_COLUMNS = 1024
_BLOCK = 128
_CHUNK = 2048  # pairs that a block of the first two launches takes
_GATHER_ROWS = 16
_CLUSTER = 2  # blocks
_ROW_STEP = 8  # rows that an expert's first is a multiple of


@dataclass(frozen=True)
class Shape:
    """How the main kernel is built.

    Args:
        tokens: most rows of a group, which is what one weight tile is multiplied with.
        stages: of the ring in shared memory, each 128 of K.
        turns_from: rows of a group from which warpgroups multiply in turn.
    """

    tokens: int = 144
    stages: int = 4
    turns_from: int = 80

    def shared_bytes(self) -> int:
        """Dynamic shared memory; the kernel asserts that it counts the same."""
        stage = 2 * _BLOCK * _BLOCK + self.tokens * (_BLOCK + 4) + 16
        staged = self.tokens * _BLOCK
        return self.stages * (stage + 16) + staged + (8 + 1) * self.tokens * 4 + 128

    def defines(self, hidden: int, inner: int) -> Defines:
        """Macros of ``experts_fp8_many.cu`` for a geometry."""
        return {
            "HIDDEN": hidden,
            "INNER": inner,
            "TOKENS": self.tokens,
            "STAGES": self.stages,
            "TURNS_FROM": self.turns_from,
            "SHARED": self.shared_bytes(),
        }


SHAPE = Shape()


def takes(hidden: int, inner: int) -> bool:
    """Whether there is a tile of a weight for each block of a cluster."""
    return hidden % (_CLUSTER * 256) == 0 and inner % (_CLUSTER * 128) == 0


@dataclass(frozen=True)
class RowKernels:
    """What orders rows."""

    count: CudaKernel
    place: CudaKernel
    gather: CudaKernel


@functools.cache
def row_kernels(
    experts: int, hidden: int, top_k: int, index: torch.dtype, tokens: int
) -> RowKernels:
    """Kernels for a geometry, indices of a type and groups of at most ``tokens`` rows."""
    defines: Defines = {
        "HIDDEN": hidden,
        "TOP_K": top_k,
        "INDEX": INDEX_TYPES[index],
        "EXPERTS": experts,
        "TOKENS": tokens,
    }
    return RowKernels(
        *(
            CudaKernel("experts_fp8_rows.cu", f"experts_{name}", defines, overlap=True)
            for name in ("count", "place", "gather")
        )
    )


@functools.cache
def main_kernel(hidden: int, inner: int, shape: Shape) -> CudaKernel:
    """Both projections of all units."""
    return CudaKernel(
        "experts_fp8_many.cu",
        "experts_many",
        shape.defines(hidden, inner),
        shared=shape.shared_bytes(),
        cluster=(_CLUSTER, 1, 1),
        overlap=True,
    )


@functools.cache
def combine_kernel(hidden: int, top_k: int) -> CudaKernel:
    """The weighted sum over a token's experts."""
    defines = {"HIDDEN": hidden, "TOP_K": top_k}
    return CudaKernel("experts_fp8_combine.cu", "experts_combine", defines, overlap=True)


def _resident_blocks(kernel: CudaKernel) -> int:
    """Blocks of all clusters that fit at once: items may wait for those of other clusters."""
    return kernel.cluster[0] * kernel.resident_clusters(THREADS, kernel.cluster)


def weight_map(weight: Tensor, *, interleaved: bool) -> object:
    """Descriptor of an e4m3 matrix ``[rows, columns]`` that copies 128 x 128.

    Args:
        weight: rows a multiple of 16.
        interleaved: of every 16 rows those of even number come first, so that a thread that holds
            two rows of a product eight apart holds neighbouring columns of the result.
    """
    rows, columns = weight.shape
    strides = (2 * columns, columns) if interleaved else (columns, 8 * columns)
    return tensor_map(
        weight,
        (_BLOCK // 16, 2, 8, _BLOCK),
        shape=(rows // 16, 2, 8, columns),
        strides=(16 * columns, strides[1], strides[0], 1),
        l2_promotion=256,
    )


@dataclass(frozen=True)
class Rows:
    """Rows in the order of their experts, laid out as ``src/experts_fp8_units.cuh`` says.

    Args:
        values: bytes of e4m3 ``[H/128, capacity, 128]``.
        scales: fp32 ``[H/128, capacity]``.
        row_of: int32 ``[pairs]``, -1 for a pair whose expert is absent.
        units: int32 ``[most, 4]``: expert, first row, rows, width of a group.
        unit_counts: int32 ``[4]``: pairs, singles, rows with gaps, nothing.
        finished: int32 ``[most]``, zero for every unit.
    """

    values: Tensor
    scales: Tensor
    row_of: Tensor
    units: Tensor
    unit_counts: Tensor
    finished: Tensor


def order_rows(
    kernels: RowKernels,
    indices: Tensor,
    x: Tensor,
    x_scale: Tensor,
    experts: int,
    most_tokens: int,
) -> Rows:
    """A row for every pair of a token and an expert, in three launches.

    Args:
        kernels: for what follows.
        indices: int64 or int32 ``[N, k]``.
        x: of one byte, ``[N, H]``.
        x_scale: fp32 ``[N, H/128]``.
        experts: how many there are.
        most_tokens: rows of a group.
    """
    pairs, hidden = indices.numel(), x.shape[1]
    # every expert's rows and a gap; and what copies of a whole group may read beyond
    most = pairs + (_ROW_STEP - 1) * min(pairs, experts)
    capacity = -(-(most + most_tokens) // _GATHER_ROWS) * _GATHER_ROWS
    units_most = min(pairs, experts) + pairs // most_tokens
    chunks = -(-pairs // _CHUNK)

    def empty(*sizes: int) -> Tensor:
        return torch.empty(sizes, dtype=torch.int32, device=x.device)

    counts, pair_of = empty(chunks, experts), empty(capacity)
    rows = Rows(
        values=x.new_empty((hidden // _BLOCK, capacity, _BLOCK), dtype=torch.uint8),
        scales=x_scale.new_empty(hidden // _BLOCK, capacity),
        row_of=empty(pairs),
        units=empty(units_most, 4),
        unit_counts=empty(4),
        finished=empty(units_most),
    )
    kernels.count((chunks, 1, 1), 1024, indices, pairs, counts)
    kernels.place(
        (chunks, 1, 1),
        1024,
        indices,
        pairs,
        counts,
        pair_of,
        rows.row_of,
        rows.units,
        rows.unit_counts,
        rows.finished,
    )
    kernels.gather(
        (capacity // _GATHER_ROWS, 1, 1),
        256,
        x,
        x_scale,
        pair_of,
        rows.unit_counts,
        rows.values,
        rows.scales,
        capacity,
    )
    return rows


def experts_many(
    x: Tensor,
    x_scale: Tensor,
    weights: Tensor,
    indices: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    down: Tensor,
    down_scale: Tensor,
    shape: Shape = SHAPE,
) -> Tensor:
    """``dsa::experts_fp8`` of at least one pair, where :func:`takes` holds.

    Besides the result, memory for every (token, slot) pair's row: H + I bytes of operands and 2 H
    of its expert's output.
    """
    experts, hidden, inner = down.shape
    tokens, top_k = indices.shape
    kernels = row_kernels(experts, hidden, top_k, indices.dtype, shape.tokens)
    rows = order_rows(kernels, indices, x, x_scale, experts, shape.tokens)
    capacity = rows.values.shape[1]
    inner_values = x.new_empty((inner // _BLOCK, capacity, _BLOCK), dtype=torch.uint8)
    inner_scales = x_scale.new_empty(inner // _BLOCK, capacity)
    outputs = x.new_empty((capacity, hidden), dtype=torch.bfloat16)
    out = x.new_empty((tokens, hidden), dtype=torch.bfloat16)
    main = main_kernel(hidden, inner, shape)
    main(
        (_resident_blocks(main), 1, 1),
        THREADS,
        weight_map(gate_up.view(-1, hidden), interleaved=True),
        weight_map(down.view(-1, inner), interleaved=False),
        rows.values,
        rows.scales,
        gate_up_scale,
        down_scale,
        rows.units,
        rows.unit_counts,
        rows.finished,
        inner_values,
        inner_scales,
        outputs,
        capacity,
    )
    columns = -(-hidden // COMBINE_COLUMNS)
    combine_kernel(hidden, top_k)((tokens, columns, 1), 128, outputs, weights, rows.row_of, out)
    return out
