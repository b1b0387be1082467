"""``dsa::experts_fp8`` on Hopper: both projections of all experts in one persistent launch."""

import functools

import torch
from torch import Tensor

from dsa_compile.kernels.cuda.compiler import Defines
from dsa_compile.kernels.cuda.launch import CudaKernel, tensor_map
from dsa_compile.ops.experts_fp8 import check_experts_fp8
from dsa_compile.ops.library import bad_input
from dsa_compile.ops.quantize import require_whole_blocks

_THREADS = 384
_BOX = 128  # rows and bytes of a weight's tile
_COMBINE_COLUMNS = 1024
_INDEX_TYPES = {torch.int64: "long long", torch.int32: "int"}

# Most rows of a group, stages of the ring, blocks of a cluster. Few rows an expert leave shared
# memory to a deeper ring.
_NARROW = (32, 6, 1)
_WIDE = (144, 4, 1)
_NARROW_ROWS = 12  # an expert on average, up to which the narrow one is built


def main_defines(hidden: int, inner: int, top_k: int, wide: bool) -> Defines:
    """Macros of ``experts_fp8.cu`` for a geometry, for many or few tokens."""
    tokens, stages, cluster = _WIDE if wide else _NARROW
    return {
        "HIDDEN": hidden,
        "INNER": inner,
        "TOP_K": top_k,
        "TOKENS": tokens,
        "STAGES": stages,
        "CLUSTER": cluster,
        "SHARED": shared_bytes(tokens, stages),
    }


def shared_bytes(tokens: int, stages: int) -> int:
    """Dynamic shared memory; the kernel asserts that it counts the same."""
    stage = 2 * _BOX * _BOX + tokens * (_BOX + 4)
    out = min(tokens, 72) * 144
    return stages * stage + 2 * out + 3 * tokens * 4 + stages * 16


@functools.cache
def _kernels(
    experts: int, hidden: int, inner: int, top_k: int, index: torch.dtype, wide: bool
) -> tuple[CudaKernel, CudaKernel, CudaKernel]:
    """Plan, products, combination."""
    tokens, _, cluster = _WIDE if wide else _NARROW
    defines = main_defines(hidden, inner, top_k, wide)
    index_type = _INDEX_TYPES[index]
    plan = CudaKernel(
        "experts_fp8_plan.cu",
        "experts_plan",
        {"INDEX": index_type, "EXPERTS": experts, "TOKENS": tokens, "CLUSTER": cluster},
    )
    main = CudaKernel(
        "experts_fp8.cu",
        "experts",
        defines,
        shared=int(defines["SHARED"]),
        cluster=(cluster, 1, 1),
        overlap=True,
    )
    combine = CudaKernel(
        "experts_fp8_combine.cu",
        "experts_combine",
        {"INDEX": index_type, "EXPERTS": experts, "TOP_K": top_k, "HIDDEN": hidden},
        overlap=True,
    )
    return plan, main, combine


@functools.cache
def _multiprocessors(device: int) -> int:
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


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
    out = torch.empty(tokens, hidden, dtype=torch.bfloat16, device=x.device)
    if pairs == 0:
        return out.zero_()
    wide = pairs > _NARROW_ROWS * experts
    plan, main, combine = _kernels(experts, hidden, inner, top_k, indices.dtype, wide)
    rows, _, cluster = _WIDE if wide else _NARROW
    groups_most = (min(pairs, experts) + pairs // (rows * cluster)) * cluster

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=x.device)

    pair_of, groups, count, finished = (
        empty(pairs),
        empty(groups_most, 4),
        empty(1),
        empty(groups_most),
    )
    inner_values = empty(pairs, inner, dtype=torch.uint8)
    inner_scale = empty(pairs, inner // _BOX, dtype=torch.float32)
    outputs = empty(pairs, hidden, dtype=torch.bfloat16)
    plan((1, 1, 1), 1024, indices, pairs, pair_of, groups, count, finished)
    main(
        (_multiprocessors(x.device.index) // cluster * cluster, 1, 1),
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
    columns = -(-hidden // _COMBINE_COLUMNS)
    combine((tokens, columns, 1), 128, outputs, weights, indices, out)
    return out
