"""The router: scores of all experts by a split product, then the choice, one launch each."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_FILL = 132  # programs that keep a Hopper GPU's memory busy
_BLOCK_K = 128


# Numbers that differ from step to step are neither constants nor specialise a kernel: it would be
# compiled anew for many of them, while requests wait.
@triton.jit(do_not_specialize=["tokens"])
def router_product_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    parts: tl.tensor,
    tokens: int,
    experts: int,
    hidden: int,
    split: int,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EXACT: tl.constexpr,
) -> None:
    """``parts[s, t, e]``: the product over the s-th run of ``split`` elements, in fp32.

    Products of bf16 are exact in fp32. If ``EXACT``, operands are fp32, cut into three tf32 each.
    """
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    expert = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    part = tl.program_id(2)
    k = part * split + tl.arange(0, BLOCK_K)
    token_in = token < tokens
    expert_in = expert < experts
    row = token.to(tl.int64)[:, None] * hidden
    total = tl.zeros((BLOCK_E, BLOCK_T), tl.float32)
    for start in range(0, split, BLOCK_K):
        inside = start + k < tl.minimum((part + 1) * split, hidden)
        a = tl.load(
            weight + expert[:, None] * hidden + start + k[None, :],
            expert_in[:, None] & inside[None, :],
            0.0,
        )
        b = tl.load(x + row + start + k[None, :], token_in[:, None] & inside[None, :], 0.0)
        if EXACT:
            total = tl.dot(
                a.to(tl.float32), tl.trans(b.to(tl.float32)), total, input_precision="tf32x3"
            )
        else:
            total = tl.dot(a, tl.trans(b), total)
    to = parts + (part * tokens + token.to(tl.int64)[:, None]) * experts + expert[None, :]
    tl.store(to, tl.trans(total), token_in[:, None] & expert_in[None, :])


@triton.jit(do_not_specialize=["tokens", "count"])
def router_choice_kernel(
    parts: tl.tensor,
    bias: tl.tensor,
    weights: tl.tensor,
    indices: tl.tensor,
    slot_mapping: tl.tensor,
    tokens: int,
    count: int,
    n_group: int,
    group_size: int,
    topk_group: int,
    scale: float,
    PARTS: tl.constexpr,
    TOP_K: tl.constexpr,
    SHARED: tl.constexpr,
    NORMALIZE: tl.constexpr,
    SKIP: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    SLOTS: tl.constexpr,
) -> None:
    """The choice of one token, from ``count`` parts, at most ``PARTS``.

    Experts lie as ``[GROUPS, SIZE]``, both padded to powers of two.
    If ``SKIP``, a token whose slot is negative takes none; else ``slot_mapping`` is not read.
    """
    token = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS)
    member = tl.arange(0, SIZE)
    expert = group[:, None] * group_size + member[None, :]
    inside = (group[:, None] < n_group) & (member[None, :] < group_size)
    experts = n_group * group_size
    logits = tl.zeros((GROUPS, SIZE), tl.float32)
    for part in tl.static_range(PARTS):
        here = inside & (tl.full((1, 1), part, tl.int32) < count)
        logits += tl.load(parts + (part * tokens + token) * experts + expert, here, 0.0)
    scores = 1.0 / (1.0 + tl.exp(-logits))
    choice = scores + tl.load(bias + expert, inside, 0.0)
    # a token of NaN takes the first experts: any order of NaN might name one that there is not
    choice = tl.where(choice == choice, choice, float("inf"))
    choice = tl.where(inside, choice, float("-inf"))

    best = tl.max(choice, 1)
    first = tl.argmax(choice, 1)
    second = tl.max(tl.where(member[None, :] == first[:, None], float("-inf"), choice), 1)
    value = tl.where(group < n_group, best + second, float("-inf"))
    # a group is kept if fewer than topk_group are better; of equals, the first
    rival = (value[None, :] > value[:, None]) | (
        (value[None, :] == value[:, None]) & (group[None, :] < group[:, None])
    )
    kept = tl.sum(rival.to(tl.int32), 1) < topk_group
    choice = tl.where(kept[:, None] | (topk_group >= n_group), choice, float("-inf"))

    choice = tl.reshape(choice, (GROUPS * SIZE,))
    scores = tl.reshape(scores, (GROUPS * SIZE,))
    place = tl.arange(0, GROUPS * SIZE)
    slot = tl.arange(0, SLOTS)
    chosen = tl.zeros((SLOTS,), tl.int64)
    values = tl.zeros((SLOTS,), tl.float32)
    for i in tl.static_range(TOP_K):
        at = tl.argmax(choice, 0)
        score = tl.sum(tl.where(place == at, scores, 0.0), 0)
        choice = tl.where(place == at, float("-inf"), choice)
        chosen = tl.where(slot == i, (at // SIZE * group_size + at % SIZE).to(tl.int64), chosen)
        values = tl.where(slot == i, score, values)
    if NORMALIZE:
        values /= tl.sum(values, 0) + 1e-20
    values = tl.where(slot < TOP_K, values * scale, 1.0)
    chosen = tl.where(slot < TOP_K, chosen, (experts + slot - TOP_K).to(tl.int64))
    to = token * (TOP_K + SHARED) + slot
    tl.store(weights + to, values, slot < TOP_K + SHARED)
    if SKIP:
        chosen = tl.where(
            tl.load(slot_mapping + token) < 0, tl.full((SLOTS,), -1, tl.int64), chosen
        )
    tl.store(indices + to, chosen, slot < TOP_K + SHARED)


def router(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    n_group: int,
    topk_group: int,
    top_k: int,
    normalize: bool,
    scale: float,
    shared_experts: int = 0,
    slot_mapping: Tensor | None = None,
    zero_dropped: bool = False,
    softmax: bool = False,
) -> tuple[Tensor, Tensor]:
    """``dsa::router`` for up to 1,024 experts; of equal scores the lowest expert wins.

    Raises:
        ValueError: operands do not fit together or are not supported.
    """
    assert bias is not None  # a condition in the table
    tokens, hidden = x.shape
    experts = weight.shape[0]
    size = experts // n_group
    columns = top_k + shared_experts
    weights = torch.empty(tokens, columns, dtype=torch.float32, device=x.device)
    indices = torch.empty(tokens, columns, dtype=torch.int64, device=x.device)
    if tokens == 0:
        return weights, indices
    block_t = 16 if tokens <= 16 else 32 if tokens <= 32 else 64
    block_e = 64 if experts > 32 else 32
    tiles = triton.cdiv(tokens, block_t) * triton.cdiv(experts, block_e)
    blocks = triton.cdiv(hidden, _BLOCK_K)
    split = _split(blocks, tiles)
    count = triton.cdiv(hidden, split)
    parts = torch.empty(count, tokens, experts, dtype=torch.float32, device=x.device)
    router_product_kernel[(triton.cdiv(tokens, block_t), triton.cdiv(experts, block_e), count)](
        x.contiguous(),
        weight.contiguous(),
        parts,
        tokens,
        experts,
        hidden,
        split,
        BLOCK_T=block_t,
        BLOCK_E=block_e,
        BLOCK_K=_BLOCK_K,
        EXACT=x.dtype is not torch.bfloat16 or weight.dtype is not torch.bfloat16,
        num_warps=4,
        num_stages=3,
    )
    router_choice_kernel[(tokens,)](
        parts,
        bias,
        weights,
        indices,
        indices if slot_mapping is None else slot_mapping,
        tokens,
        count,
        n_group,
        size,
        topk_group,
        scale,
        PARTS=triton.cdiv(hidden, _split(blocks, triton.cdiv(experts, block_e))),  # at the most
        TOP_K=top_k,
        SHARED=shared_experts,
        NORMALIZE=normalize,
        SKIP=slot_mapping is not None,
        GROUPS=triton.next_power_of_2(n_group),
        SIZE=triton.next_power_of_2(size),
        SLOTS=triton.next_power_of_2(columns),
        num_warps=1 if experts <= 256 else 4,
    )
    return weights, indices


def _split(blocks: int, tiles: int) -> int:
    """Elements of a part, where so many tiles have so many blocks of K each."""
    parts = max(1, min(blocks, _FILL // tiles))
    split: int = _BLOCK_K * triton.cdiv(blocks, parts)
    return split
