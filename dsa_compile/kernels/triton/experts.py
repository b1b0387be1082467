"""``dsa::experts`` and ``dsa::experts_fp8`` in Triton: four launches whatever was chosen.

Sorting, gate·up with the activation, down, and the weighted sum. Tokens' rows are gathered by the
first product's loads and scattered by the second's stores.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsa_compile.kernels.triton.e4m3 import block_scale, reciprocal, saturate
from dsa_compile.kernels.triton.experts_rows import combine, sort_pairs, tile_rows, tiles_most
from dsa_compile.ops.quantize import block_count

_FP8_BLOCK = 128


@triton.jit
def gate_up_kernel(
    x: tl.tensor,
    x_scale: tl.tensor,
    gate_up: tl.tensor,
    gate_up_scale: tl.tensor,
    starts: tl.tensor,
    pair_of: tl.tensor,
    hidden: tl.tensor,
    hidden_scale: tl.tensor,
    experts: int,
    H: tl.constexpr,
    INNER: tl.constexpr,
    TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FP8: tl.constexpr,
) -> None:
    """``hidden[row] = silu(gate) * up`` of a tile of rows and BLOCK_N of the inner columns.

    Rounds as ``dsa::experts`` does; if FP8, stays in fp32 and is quantised. BLOCK_N and BLOCK_K are
    128 then: a tile of a weight has one scale.
    """
    H_BLOCKS: tl.constexpr = (H + BLOCK_K - 1) // BLOCK_K
    INNER_BLOCKS: tl.constexpr = (INNER + BLOCK_N - 1) // BLOCK_N
    expert, first, end = tile_rows(tl.program_id(1), starts, experts, EXPERTS, ROWS)
    if expert >= experts:
        return
    row = first + tl.arange(0, ROWS)
    row_in = row < end
    token = (tl.load(pair_of + row, row_in, 0) // TOP_K).to(tl.int64)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    column_in = column < INNER
    k = tl.arange(0, BLOCK_K)
    gate_row = expert.to(tl.int64) * (2 * INNER) + column
    gate = tl.zeros((ROWS, BLOCK_N), tl.float32)
    up = tl.zeros((ROWS, BLOCK_N), tl.float32)
    for block in range(H_BLOCKS):
        at = block * BLOCK_K + k
        k_in = at < H
        a = tl.load(x + token[:, None] * H + at[None, :], row_in[:, None] & k_in[None, :], 0.0)
        weight_in = k_in[:, None] & column_in[None, :]
        g = tl.load(gate_up + gate_row[None, :] * H + at[:, None], weight_in, 0.0)
        u = tl.load(gate_up + (gate_row + INNER)[None, :] * H + at[:, None], weight_in, 0.0)
        if FP8:
            a_scale = tl.load(x_scale + token * H_BLOCKS + block, row_in, 0.0)
            scale_row = expert.to(tl.int64) * (2 * INNER_BLOCKS) + tl.program_id(0)
            g_scale = tl.load(gate_up_scale + scale_row * H_BLOCKS + block)
            u_scale = tl.load(gate_up_scale + (scale_row + INNER_BLOCKS) * H_BLOCKS + block)
            gate += tl.dot(a, g) * (a_scale * g_scale)[:, None]
            up += tl.dot(a, u) * (a_scale * u_scale)[:, None]
        else:
            gate = tl.dot(a, g, gate, input_precision="ieee")
            up = tl.dot(a, u, up, input_precision="ieee")
    to = row.to(tl.int64)[:, None] * INNER + column[None, :]
    written = row_in[:, None] & column_in[None, :]
    if FP8:
        value = gate / (1.0 + tl.exp(-gate)) * up
        scale = block_scale(tl.max(tl.abs(value), 1), False)
        tl.store(hidden_scale + row.to(tl.int64) * INNER_BLOCKS + tl.program_id(0), scale, row_in)
        tl.store(hidden + to, saturate(value * reciprocal(scale)[:, None]), written)
    else:
        dtype = hidden.dtype.element_ty
        gate = gate.to(dtype).to(tl.float32)
        up = up.to(dtype).to(tl.float32)
        value = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32) * up
        tl.store(hidden + to, value.to(dtype), written)


@triton.jit
def down_kernel(
    hidden: tl.tensor,
    hidden_scale: tl.tensor,
    down: tl.tensor,
    down_scale: tl.tensor,
    starts: tl.tensor,
    pair_of: tl.tensor,
    outputs: tl.tensor,
    experts: int,
    H: tl.constexpr,
    INNER: tl.constexpr,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FP8: tl.constexpr,
) -> None:
    """``outputs[pair] = down · hidden[row]`` of a tile of rows and BLOCK_N of the columns."""
    H_BLOCKS: tl.constexpr = (H + BLOCK_N - 1) // BLOCK_N
    INNER_BLOCKS: tl.constexpr = (INNER + BLOCK_K - 1) // BLOCK_K
    expert, first, end = tile_rows(tl.program_id(1), starts, experts, EXPERTS, ROWS)
    if expert >= experts:
        return
    row = first + tl.arange(0, ROWS)
    row_in = row < end
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    column_in = column < H
    k = tl.arange(0, BLOCK_K)
    weight_row = expert.to(tl.int64) * H + column
    total = tl.zeros((ROWS, BLOCK_N), tl.float32)
    for block in range(INNER_BLOCKS):
        at = block * BLOCK_K + k
        k_in = at < INNER
        a = tl.load(
            hidden + row.to(tl.int64)[:, None] * INNER + at[None, :],
            row_in[:, None] & k_in[None, :],
            0.0,
        )
        b = tl.load(
            down + weight_row[None, :] * INNER + at[:, None],
            k_in[:, None] & column_in[None, :],
            0.0,
        )
        if FP8:
            a_scale = tl.load(hidden_scale + row.to(tl.int64) * INNER_BLOCKS + block, row_in, 0.0)
            scale_row = expert.to(tl.int64) * H_BLOCKS + tl.program_id(0)
            b_scale = tl.load(down_scale + scale_row * INNER_BLOCKS + block)
            total += tl.dot(a, b) * (a_scale * b_scale)[:, None]
        else:
            total = tl.dot(a, b, total, input_precision="ieee")
    pair = tl.load(pair_of + row, row_in, 0).to(tl.int64)
    to = outputs + pair[:, None] * H + column[None, :]
    tl.store(to, total.to(outputs.dtype.element_ty), row_in[:, None] & column_in[None, :])


def experts(x: Tensor, weights: Tensor, indices: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """``dsa::experts``; an index outside ``[0, E)`` is skipped.

    Raises:
        ValueError: weights are not float32, or operands are of several dtypes.
    """
    block = 64 if x.dtype is torch.bfloat16 else 32
    return _run(x, x, weights, indices, gate_up, gate_up, down, down, block, fp8=False)


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
    """``dsa::experts_fp8``; an expert's output is rounded to bf16 before it is weighted.

    Raises:
        ValueError: operands do not fit together.
    """
    operands = (x, x_scale, weights, indices, gate_up, gate_up_scale, down, down_scale)
    return _run(*operands, _FP8_BLOCK, fp8=True)


def _run(
    x: Tensor,
    x_scale: Tensor,
    weights: Tensor,
    indices: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    down: Tensor,
    down_scale: Tensor,
    block: int,
    *,
    fp8: bool,
) -> Tensor:
    count, width, inner = down.shape
    tokens, top_k = indices.shape
    pairs = tokens * top_k
    dtype = torch.bfloat16 if fp8 else x.dtype
    out = torch.empty(tokens, width, dtype=dtype, device=x.device)
    if pairs == 0:
        return out.zero_()
    indices, weights = indices.contiguous(), weights.contiguous()
    starts, pair_of = sort_pairs(indices, count)
    hidden = torch.empty(pairs, inner, dtype=x.dtype, device=x.device)
    hidden_scale = torch.empty(
        (pairs, block_count(inner)) if fp8 else (1,), dtype=torch.float32, device=x.device
    )
    outputs = torch.empty(pairs, width, dtype=dtype, device=x.device)
    rows = min(max(triton.next_power_of_2(triton.cdiv(pairs, count)), 16), 64)
    tiles = tiles_most(pairs, count, rows)
    shared = {
        "H": width,
        "INNER": inner,
        "EXPERTS": triton.next_power_of_2(count),
        "ROWS": rows,
        "BLOCK_N": block,
        "BLOCK_K": block,
        "FP8": fp8,
        "num_warps": 8 if rows > 32 else 4,
        "num_stages": 3,
    }
    gate_up_kernel[(triton.cdiv(inner, block), tiles)](
        x.contiguous(),
        x_scale.contiguous(),
        gate_up.contiguous(),
        gate_up_scale.contiguous(),
        starts,
        pair_of,
        hidden,
        hidden_scale,
        count,
        TOP_K=top_k,
        **shared,
    )
    down_kernel[(triton.cdiv(width, block), tiles)](
        hidden,
        hidden_scale,
        down.contiguous(),
        down_scale.contiguous(),
        starts,
        pair_of,
        outputs,
        count,
        **shared,
    )
    combine(outputs, weights, indices, count, out)
    return out
