"""The indexer's head weights for many tokens: an fp32 product on bf16 tensor cores."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_FILL = 132  # programs that keep a Hopper GPU busy
_BLOCK_T, _BLOCK_K = 128, 64
_SUM_BLOCK = 64


# Neither tokens nor how K is split make another kernel: see router.py.
@triton.jit(do_not_specialize=["tokens"])
def head_weights_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    parts: tl.tensor,
    tokens: int,
    heads: int,
    hidden: int,
    x_stride: int,
    split: int,
    scale: float,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EXACT: tl.constexpr,
) -> None:
    """``parts[s, t, h]``: the scaled product over the s-th run of ``split`` elements.

    A weight is the sum of three bf16 to its last bit, whose products with bf16 are exact in fp32.
    If ``EXACT``, x is fp32 and both are cut into three tf32. Sums leave the tensor cores, which do
    not keep every bit of long ones, after each block.
    """
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    part = tl.program_id(1)
    head = tl.arange(0, BLOCK_E)
    k = part * split + tl.arange(0, BLOCK_K)
    token_in = token < tokens
    head_in = head < heads
    row = token.to(tl.int64)[:, None] * x_stride
    total = tl.zeros((BLOCK_E, BLOCK_T), tl.float32)
    for start in range(0, split, BLOCK_K):
        inside = start + k < tl.minimum((part + 1) * split, hidden)
        a = tl.load(
            weight + head[:, None] * hidden + start + k[None, :],
            head_in[:, None] & inside[None, :],
            0.0,
        )
        b = tl.load(x + row + start + k[None, :], token_in[:, None] & inside[None, :], 0.0)
        b = tl.trans(b)
        if EXACT:
            total += tl.dot(a, b.to(tl.float32), input_precision="tf32x3")
        else:
            high = a.to(tl.bfloat16)
            rest = a - high.to(tl.float32)
            middle = rest.to(tl.bfloat16)
            low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
            product = tl.dot(low, b)
            product = tl.dot(middle, b, product)
            total += tl.dot(high, b, product)
    to = parts + (part * tokens + token.to(tl.int64)[:, None]) * heads + head[None, :]
    tl.store(to, tl.trans(total) * scale, token_in[:, None] & head_in[None, :])


@triton.jit(do_not_specialize=["number"])
def sum_kernel(
    parts: tl.tensor,
    out: tl.tensor,
    count: int,
    number: int,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Adds up ``number`` parts of ``count`` values; ROWS is at least as many."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    part = tl.arange(0, ROWS)
    inside = (part < number)[:, None] & (at < count)[None, :]
    total = tl.sum(tl.load(parts + part[:, None] * count + at[None, :], inside, 0.0), 0)
    tl.store(out + at, total, at < count)


def index_head_weights(x: Tensor, weight: Tensor, scale: float) -> Tensor:
    """``dsa::index_head_weights``: two launches, one for very many tokens.

    Raises:
        ValueError: operands do not fit together.
    """
    tokens, hidden = x.shape
    heads = weight.shape[0]
    x = x if x.stride(1) == 1 else x.contiguous()
    tiles = triton.cdiv(tokens, _BLOCK_T)
    blocks = triton.cdiv(hidden, _BLOCK_K)
    split = _BLOCK_K * triton.cdiv(blocks, max(1, min(blocks, _FILL // max(tiles, 1))))
    count = triton.cdiv(hidden, split)
    parts = torch.empty(count, tokens, heads, dtype=torch.float32, device=x.device)
    if tokens == 0:
        return parts[0]
    head_weights_kernel[(tiles, count)](
        x,
        weight.contiguous(),
        parts,
        tokens,
        heads,
        hidden,
        x.stride(0),
        split,
        scale,
        BLOCK_T=_BLOCK_T,
        BLOCK_E=max(triton.next_power_of_2(heads), 16),
        BLOCK_K=_BLOCK_K,
        EXACT=x.dtype is not torch.bfloat16,
        num_warps=8,
        num_stages=3,
    )
    if count == 1:
        return parts[0]
    out = torch.empty(tokens, heads, dtype=torch.float32, device=x.device)
    sum_kernel[(triton.cdiv(out.numel(), _SUM_BLOCK),)](
        parts,
        out,
        out.numel(),
        count,
        ROWS=triton.next_power_of_2(min(blocks, _FILL)),
        BLOCK=_SUM_BLOCK,
        num_warps=4,
    )
    return out
