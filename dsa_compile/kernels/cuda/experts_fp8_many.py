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
_BLOCK_ROWS = 128  # rows of an expert that a block multiplies at a time
_BOX_ROWS = 64  # of a weight, that one copy brings
_MATH_WARPS = 8
_STAGES = 4  # of the ring in shared memory, each 128 of K
_CHUNK = 2048  # pairs that a block of the first two launches takes
_GATHER_ROWS = 16
_CLUSTER = 2  # blocks
_ROW_STEP = 8  # rows that an expert's first is a multiple of


def takes(hidden: int, inner: int) -> bool:
    """Whether there is a tile of a weight for each block of a cluster."""
    return hidden % (_CLUSTER * 256) == 0 and inner % (_CLUSTER * 128) == 0


@dataclass(frozen=True)
class RowKernels:
    """Kernels that order rows by expert."""

    count: CudaKernel
    place: CudaKernel
    gather: CudaKernel


@functools.cache
def row_kernels(experts: int, hidden: int, top_k: int, index: torch.dtype) -> RowKernels:
    """Kernels for a geometry and indices of a type."""
    defines: Defines = {
        "HIDDEN": hidden,
        "TOP_K": top_k,
        "INDEX": INDEX_TYPES[index],
        "EXPERTS": experts,
    }
    return RowKernels(
        *(
            CudaKernel("experts_fp8_rows.cu", f"experts_{name}", defines, overlap=True)
            for name in ("count", "place", "gather")
        )
    )


def _shared_bytes() -> int:
    """Dynamic shared memory of the main kernel, which asserts that it counts the same."""
    stage = 2 * _BLOCK * _BLOCK + _BLOCK_ROWS * (_BLOCK + 4) + 16
    staged = _MATH_WARPS * 2 * 16 * _BLOCK
    return _STAGES * (stage + 16) + staged + 2 * 64 * 4


@functools.cache
def main_kernel(hidden: int, inner: int) -> CudaKernel:
    """Kernel of both projections of all slots."""
    shared = _shared_bytes()
    return CudaKernel(
        "experts_fp8_many.cu",
        "experts_many",
        {"HIDDEN": hidden, "INNER": inner, "STAGES": _STAGES, "SHARED": shared},
        shared=shared,
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


@dataclass(frozen=True)
class Rows:
    """Rows in the order of their experts, laid out as ``src/experts_fp8_slots.cuh`` says.

    Args:
        values: bytes of e4m3 ``[H/128, capacity, 128]``.
        scales: fp32 ``[H/128, capacity]``.
        row_of: int32 ``[pairs]``, -1 for a pair whose expert is absent.
        slots: int32 ``[most, 4]``: expert, first row, rows, kind.
        slot_counts: int32 ``[2]``: slots, rows with gaps.
        finished: int32 ``[most]``, zero for every slot.
    """

    values: Tensor
    scales: Tensor
    row_of: Tensor
    slots: Tensor
    slot_counts: Tensor
    finished: Tensor


def order_rows(
    kernels: RowKernels, indices: Tensor, x: Tensor, x_scale: Tensor, experts: int
) -> Rows:
    """A row for every pair of a token and an expert, in three launches.

    Args:
        kernels: for what follows.
        indices: int64 or int32 ``[N, k]``.
        x: of one byte, ``[N, H]``.
        x_scale: fp32 ``[N, H/128]``.
        experts: how many there are.
    """
    pairs, hidden = indices.numel(), x.shape[1]
    most = pairs + (_ROW_STEP - 1) * min(pairs, experts)  # every expert's rows and a gap
    capacity = -(-most // _GATHER_ROWS) * _GATHER_ROWS
    slots_most = min(pairs, experts) + pairs // _BLOCK_ROWS
    chunks = -(-pairs // _CHUNK)

    def empty(*sizes: int) -> Tensor:
        return torch.empty(sizes, dtype=torch.int32, device=x.device)

    counts, pair_of = empty(chunks, experts), empty(capacity)
    rows = Rows(
        values=x.new_empty((hidden // _BLOCK, capacity, _BLOCK), dtype=torch.uint8),
        scales=x_scale.new_empty(hidden // _BLOCK, capacity),
        row_of=empty(pairs),
        slots=empty(slots_most, 4),
        slot_counts=empty(2),
        finished=empty(slots_most),
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
        rows.slots,
        rows.slot_counts,
        rows.finished,
    )
    kernels.gather(
        (capacity // _GATHER_ROWS, 1, 1),
        256,
        x,
        x_scale,
        pair_of,
        rows.slot_counts,
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
) -> Tensor:
    """``dsa::experts_fp8`` of at least one pair, where :func:`takes` holds.

    Besides the result, memory for every (token, slot) pair's row: H + I bytes of operands and 2 H
    of its expert's output.
    """
    experts, hidden, inner = down.shape
    tokens, top_k = indices.shape
    kernels = row_kernels(experts, hidden, top_k, indices.dtype)
    rows = order_rows(kernels, indices, x, x_scale, experts)
    capacity = rows.values.shape[1]
    inner_values = x.new_empty((inner // _BLOCK, capacity, _BLOCK), dtype=torch.uint8)
    inner_scales = x_scale.new_empty(inner // _BLOCK, capacity)
    outputs = x.new_empty((capacity, hidden), dtype=torch.bfloat16)
    out = x.new_empty((tokens, hidden), dtype=torch.bfloat16)
    main = main_kernel(hidden, inner)
    box = (_BOX_ROWS, _BLOCK)
    main(
        (_resident_blocks(main), 1, 1),
        THREADS,
        tensor_map(gate_up.view(-1, hidden), box, l2_promotion=256),
        tensor_map(down.view(-1, inner), box, l2_promotion=256),
        rows.values,
        rows.scales,
        gate_up_scale,
        down_scale,
        rows.slots,
        rows.slot_counts,
        rows.finished,
        inner_values,
        inner_scales,
        outputs,
        capacity,
    )
    columns = -(-hidden // COMBINE_COLUMNS)
    combine_kernel(hidden, top_k)((tokens, columns, 1), 128, outputs, weights, rows.row_of, out)
    return out
