"""Sparse attention over selected keys, in head form and in latent (absorbed MLA) form.

Indices name distinct keys; -1 names none, wherever it stands. A row without any key gives zero.
Products and softmax are fp32; one rounding to the query's dtype ends them.
"""

import math

import torch
from torch import Tensor

from dsa_compile.ops.facts import CostFacts, Family, Form, OpFacts, listed_rows, products
from dsa_compile.ops.library import define

GATHER_BYTES = 8 << 20
"""Bound on the gathered rows and scores of one chunk of tokens (a single token may exceed it)."""

_UNREAD = torch.empty(1)  # the addend of a product whose beta is 0


def sparse_attention(q: Tensor, k: Tensor, v: Tensor, indices: Tensor, scale: float) -> Tensor:
    """Attention of every query to its selected keys.

    Args:
        q: ``[B, S, H, Dqk]``; without B it is one sequence, and so are the others.
        k: ``[B, S, H, Dqk]``.
        v: ``[B, S, H, Dv]``.
        indices: int32 ``[B, S, K]``, positions in the same sequence.
        scale: on the dot products.

    Returns:
        ``[B, S, H, Dv]``.
    """
    if q.dim() == 3:
        return sparse_attention(q[None], k[None], v[None], indices[None], scale)[0]
    batch, length, heads, _ = q.shape
    keys = k.permute(0, 2, 3, 1).float()
    values = v.transpose(1, 2).float()
    out = q.new_empty((batch, length, heads, v.shape[-1]))
    step = max(1, GATHER_BYTES // max(1, 8 * batch * heads * length))
    for start in range(0, length, step):
        chosen = indices[:, start : start + step].long()
        # -1 lands in one column past the end, which is then cut off
        kept = torch.zeros((*chosen.shape[:2], length + 1), dtype=torch.bool, device=q.device)
        kept.scatter_(2, torch.where(chosen < 0, length, chosen), True)
        dropped = kept[..., :length].logical_not_().unsqueeze(1)
        logits = torch.matmul(q[:, start : start + step].transpose(1, 2).float(), keys).mul_(scale)
        weights = logits.masked_fill_(dropped, float("-inf")).softmax(-1)
        weights.masked_fill_(dropped.all(-1, keepdim=True), 0.0)
        out[:, start : start + step] = torch.matmul(weights, values).transpose(1, 2)
    return out


def absorb_query(q_nope: Tensor, w_uk: Tensor) -> Tensor:
    """Move a query into the latent space: ``[..., H, dn] x [H, dn, R] -> [..., H, R]``."""
    return _per_head(q_nope, w_uk)


def expand_output(o_latent: Tensor, w_uv: Tensor) -> Tensor:
    """Bring a latent result back to heads: ``[..., H, R] x [H, dv, R] -> [..., H, dv]``."""
    return _per_head(o_latent, w_uv.transpose(1, 2))


def _per_head(x: Tensor, weight: Tensor) -> Tensor:
    """``[..., H, i] x [H, i, o] -> [..., H, o]``."""
    flat = x.flatten(0, -3).transpose(0, 1)
    out = torch.bmm(flat, weight).transpose(0, 1).contiguous()
    return out.view(*x.shape[:-1], weight.shape[2]) if x.dim() > 3 else out


def latent_attention(
    q_latent: Tensor, q_pe: Tensor, ckv: Tensor, k_pe: Tensor, indices: Tensor, scale: float
) -> Tensor:
    """:func:`sparse_attention` after MLA absorption: one latent key and value for all heads.

    Args:
        q_latent: ``[B, S, H, R]``; without B it is one sequence, and so are the others.
        q_pe: ``[B, S, H, dr]``.
        ckv: ``[B, S, R]``, key and value.
        k_pe: ``[B, S, dr]``, the rotated part of the key.
        indices: int32 ``[B, S, K]``, positions in the same sequence.
        scale: on the dot products.

    Returns:
        ``[B, S, H, R]``.
    """
    if ckv.dim() == 2:
        return latent_attention(
            q_latent[None], q_pe[None], ckv[None], k_pe[None], indices[None], scale
        )[0]
    batch, length = ckv.shape[:2]
    rows = torch.cat((ckv, k_pe), -1).flatten(0, 1)
    first = torch.arange(batch, dtype=indices.dtype, device=indices.device) * length
    slots = torch.where(indices < 0, -1, indices + first.view(-1, 1, 1))
    query = torch.cat((q_latent, q_pe), -1).flatten(0, 1)
    return _attend(query, rows, slots.flatten(0, 1), scale, ckv.shape[2]).view(q_latent.shape)


def paged_latent_attention(
    q_latent: Tensor, q_pe: Tensor, cache: Tensor, slots: Tensor, scale: float
) -> Tensor:
    """Latent attention to rows of the paged cache.

    Args:
        q_latent: ``[T, H, R]``.
        q_pe: ``[T, H, dr]``.
        cache: ``[num_blocks, block_size, R + dr]``.
        slots: int32 ``[T, K]``, physical rows.
        scale: on the dot products.

    Returns:
        ``[T, H, R]``.
    """
    query = torch.cat((q_latent, q_pe), -1)
    return _attend(query, cache.view(-1, cache.shape[2]), slots, scale, q_latent.shape[2])


def _attend(query: Tensor, rows: Tensor, slots: Tensor, scale: float, latent: int) -> Tensor:
    """Attend from ``[T, H, W]`` to ``rows[slots]``, whose first ``latent`` columns are values."""
    tokens, heads, width = query.shape
    step = max(1, GATHER_BYTES // max(1, 4 * slots.shape[1] * (width + 2 * heads)))
    if tokens <= step:
        return _attend_chunk(query, rows, slots, scale, latent)
    out = query.new_empty((tokens, heads, latent))
    for start in range(0, tokens, step):
        out[start : start + step] = _attend_chunk(
            query[start : start + step], rows, slots[start : start + step], scale, latent
        )
    return out


def _attend_chunk(query: Tensor, rows: Tensor, slots: Tensor, scale: float, latent: int) -> Tensor:
    listed = slots >= 0
    if slots.numel() and listed.all():  # long contexts: nothing to trim, mask or blank
        gathered = _gather(rows, slots)
        unread = _UNREAD.to(query.device)
        logits = torch.baddbmm(unread, query.float(), gathered.transpose(1, 2), beta=0, alpha=scale)
        return torch.bmm(logits.softmax(-1), gathered[..., :latent]).to(query.dtype)

    columns = torch.arange(1, slots.shape[1] + 1, device=slots.device)
    used = int((listed.any(0) * columns).amax()) if slots.numel() else 0
    if not used:
        return query.new_zeros((*query.shape[:2], latent))
    slots = slots[:, :used]
    absent = (slots < 0).unsqueeze(1)
    # an absent slot reads a row of its own token: another's could hold a NaN, and 0 * NaN spreads
    own = slots.amax(1, keepdim=True)
    gathered = _gather(rows, torch.where(absent.squeeze(1), own, slots).clamp_(min=0))
    bias = torch.where(absent, float("-inf"), 0.0)
    logits = torch.baddbmm(bias, query.float(), gathered.transpose(1, 2), alpha=scale)
    out = torch.bmm(logits.softmax(-1), gathered[..., :latent])
    return out.masked_fill_(own.unsqueeze(2) < 0, 0.0).to(query.dtype)


def _gather(rows: Tensor, slots: Tensor) -> Tensor:
    """fp32 ``[T, K, W]``."""
    return rows.index_select(0, slots.flatten()).view(*slots.shape, rows.shape[1]).float()


PAGED_ATTENTION_COST = CostFacts(
    chain_us=12.0,
    fills=True,
    # of scores and values; rows in FP8 are multiplied in bf16
    flops=lambda sizes: 4.0 * math.prod(sizes.shape("q_latent")) * sizes.shape("slots")[1],
    reads={"cache": listed_rows("slots")},
)
PAGED_ATTENTION = OpFacts(Family.ATTENTION, skips="slots", cost=PAGED_ATTENTION_COST)

SPARSE_ATTENTION = define(
    "sparse_attention(Tensor q, Tensor k, Tensor v, Tensor indices, float scale) -> Tensor",
    sparse_attention,
    "(q: f[*B, S, H, D], k: q[*B, S, H, D], v: q[*B, S, H, dv], indices: i32[*B, S, K])"
    " -> q[*B, S, H, dv]",
    OpFacts(Family.ATTENTION, Form.DENSE, skips="indices"),
    where=("len(B) <= 1",),
)
ABSORB_QUERY = define(
    "absorb_query(Tensor q_nope, Tensor w_uk) -> Tensor",
    absorb_query,
    "(q_nope: f[*L, H, dn], w_uk: q_nope[H, dn, R]) -> q_nope[*L, H, R]",
    OpFacts(Family.HEAD_PRODUCT, Form.ANY, cost=CostFacts(flops=products("w_uk"))),
    where=("len(L) > 0",),
)
EXPAND_OUTPUT = define(
    "expand_output(Tensor o_latent, Tensor w_uv) -> Tensor",
    expand_output,
    "(o_latent: f[*L, H, R], w_uv: o_latent[H, dv, R]) -> o_latent[*L, H, dv]",
    OpFacts(Family.HEAD_PRODUCT, Form.ANY, cost=CostFacts(flops=products("w_uv"))),
    where=("len(L) > 0",),
)
LATENT_ATTENTION = define(
    "latent_attention(Tensor q_latent, Tensor q_pe, Tensor ckv, Tensor k_pe, Tensor indices,"
    " float scale) -> Tensor",
    latent_attention,
    "(q_latent: f[*B, S, H, R], q_pe: q_latent[*B, S, H, dr], ckv: q_latent[*B, S, R],"
    " k_pe: q_latent[*B, S, dr], indices: i32[*B, S, K]) -> q_latent[*B, S, H, R]",
    OpFacts(Family.ATTENTION, Form.DENSE, skips="indices"),
    where=("len(B) <= 1",),
    any_device=False,
)
PAGED_LATENT_ATTENTION = define(
    "paged_latent_attention(Tensor q_latent, Tensor q_pe, Tensor cache, Tensor slots,"
    " float scale) -> Tensor",
    paged_latent_attention,
    "(q_latent: f[T, H, R], q_pe: q_latent[T, H, dr], cache: q_latent[P, bs, R + dr],"
    " slots: i32[T, K]) -> q_latent[T, H, R]",
    PAGED_ATTENTION,
    any_device=False,
)
