"""The short variant's selection: every visible row of a token's context."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_SCAN = 256  # requests at a time


# Numbers that differ from step to step do not specialise a kernel: it would be compiled anew for
# the first of them that is 1, and for the first that 16 divides.
@triton.jit(do_not_specialize=["requests", "table_stride", "table_width"])
def dense_slots_kernel(
    block_tables: tl.tensor,
    cu_seqlens: tl.tensor,
    context_lens: tl.tensor,
    out: tl.tensor,
    requests: int,
    table_stride: int,
    table_width: int,
    block_size: int,
    width: int,
    SCAN: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """``COLUMNS`` columns of one token's row."""
    token = tl.program_id(0)
    # requests that end at or before this token, so the index of its own
    ended = tl.zeros((SCAN,), tl.int32)
    for first in range(0, requests, SCAN):
        index = first + tl.arange(0, SCAN)
        ends = tl.load(cu_seqlens + 1 + index, index < requests, 0x7FFFFFFF)
        ended += (ends <= token).to(tl.int32)
    request = tl.sum(ended, 0)
    real = request < requests
    end = tl.load(cu_seqlens + 1 + request, real, 0)
    position = tl.where(real, tl.load(context_lens + request, real, 0) - (end - token), -1)

    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    block = column // block_size
    visible = (column <= position) & (block < table_width)
    page = tl.load(block_tables + request.to(tl.int64) * table_stride + block, visible, -1)
    rows = tl.where(visible, page * block_size + column % block_size, -1)
    tl.store(out + token.to(tl.int64) * width + column, rows, column < width)


def dense_slots(
    block_tables: Tensor,
    cu_seqlens: Tensor,
    context_lens: Tensor,
    positions: Tensor,
    block_size: int,
    width: int,
) -> Tensor:
    """``dsa::dense_slots``."""
    tokens = positions.shape[0]
    out = torch.empty((tokens, width), dtype=torch.int32, device=positions.device)
    tables = block_tables.contiguous()
    columns = min(triton.next_power_of_2(max(width, 1)), 1024)
    dense_slots_kernel[(tokens, triton.cdiv(width, columns))](
        tables,
        cu_seqlens.contiguous(),
        context_lens.contiguous(),
        out,
        tables.shape[0],
        tables.stride(0),
        tables.shape[1],
        block_size,
        width,
        SCAN=_SCAN,
        COLUMNS=columns,
        num_warps=4,
    )
    return out
