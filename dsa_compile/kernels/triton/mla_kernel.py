"""Device code of :mod:`dsa_compile.kernels.triton.mla`."""

import triton
import triton.language as tl


@triton.jit
def attend_kernel(
    q_latent: tl.tensor,
    q_pe: tl.tensor,
    cache: tl.tensor,
    latent_rows: tl.tensor_descriptor,
    rope_rows: tl.tensor_descriptor,
    slots: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    q_token: int,
    q_head: int,
    pe_token: int,
    pe_head: int,
    row_stride: int,
    slots_token: int,
    heads: int,
    count: int,
    cache_rows: int,
    scale_log2: float,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_SLOTS: tl.constexpr,
    SCAN: tl.constexpr,
    SPLITS: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    GATHER: tl.constexpr,
) -> None:
    """Rows ``(token, split)`` of ``out`` and ``lse``.

    If ``GATHER``, keys come through ``latent_rows`` and ``rope_rows``, tensor descriptors of the
    cache with blocks of one row, else through ``cache``.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    split = tl.program_id(2)
    present = head < heads
    latent = tl.arange(0, LATENT)
    rope = tl.arange(0, ROPE)
    q = tl.load(
        q_latent + token * q_token + head[:, None] * q_head + latent[None, :],
        present[:, None],
        other=0.0,
    )
    pe = tl.load(
        q_pe + token * pe_token + head[:, None] * pe_head + rope[None, :],
        present[:, None],
        other=0.0,
    )
    slots += token * slots_token
    places = tl.arange(0, SCAN)
    scanned = tl.load(slots + places, places < count, other=-1)
    used = tl.max(tl.where(scanned >= 0, places + 1, 0), 0)  # trailing -1 cost nothing
    share = tl.cdiv(tl.cdiv(used, BLOCK_SLOTS), SPLITS) * BLOCK_SLOTS
    first = split * share
    last = tl.minimum(first + share, used)

    top = tl.full((BLOCK_HEADS,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_HEADS,), tl.float32)
    if TRANSPOSED:
        acc = tl.zeros((LATENT, BLOCK_HEADS), tl.float32)
    else:
        acc = tl.zeros((BLOCK_HEADS, LATENT), tl.float32)
    for start in range(first, last, BLOCK_SLOTS):
        place = start + tl.arange(0, BLOCK_SLOTS)
        slot = tl.load(slots + place, place < last, other=-1)
        seen = (slot >= 0) & (slot < cache_rows)
        # an absent row is read as zeros: a NaN in its place would survive a weight of zero
        if GATHER:
            row = tl.where(seen, slot, cache_rows)  # the copy engine gives zeros past the end
            kv = latent_rows.gather(row, 0)
            k_pe = rope_rows.gather(row, LATENT)
        else:
            row = cache + slot.to(tl.int64)[:, None] * row_stride
            kv = tl.load(row + latent[None, :], seen[:, None], other=0.0)
            k_pe = tl.load(row + LATENT + rope[None, :], seen[:, None], other=0.0)
        if TRANSPOSED:
            scores = tl.dot(kv, tl.trans(q), input_precision="ieee")
            scores = tl.dot(k_pe, tl.trans(pe), scores, input_precision="ieee") * scale_log2
            scores = tl.where(seen[:, None], scores, float("-inf"))
            new = tl.maximum(top, tl.max(scores, 0))
            shift = tl.where(new == float("-inf"), 0.0, new)
            weights = tl.exp2(scores - shift[None, :])
            decay = tl.exp2(top - shift)
            total = total * decay + tl.sum(weights, 0)
            acc = tl.dot(
                tl.trans(kv), weights.to(kv.dtype), acc * decay[None, :], input_precision="ieee"
            )
        else:
            scores = tl.dot(q, tl.trans(kv), input_precision="ieee")
            scores = tl.dot(pe, tl.trans(k_pe), scores, input_precision="ieee") * scale_log2
            scores = tl.where(seen[None, :], scores, float("-inf"))
            new = tl.maximum(top, tl.max(scores, 1))
            shift = tl.where(new == float("-inf"), 0.0, new)
            weights = tl.exp2(scores - shift[:, None])
            decay = tl.exp2(top - shift)
            total = total * decay + tl.sum(weights, 1)
            acc = tl.dot(weights.to(kv.dtype), kv, acc * decay[:, None], input_precision="ieee")
        top = new

    share_of = tl.where(total > 0.0, 1.0 / total, 0.0)
    base = (token * SPLITS + split) * heads
    cell = (base + head) * LATENT
    if TRANSPOSED:
        result = (acc * share_of[None, :]).to(out.dtype.element_ty)
        tl.store(out + cell[None, :] + latent[:, None], result, present[None, :])
    else:
        result = (acc * share_of[:, None]).to(out.dtype.element_ty)
        tl.store(out + cell[:, None] + latent[None, :], result, present[:, None])
    # natural logarithm; log2(0) is -inf, and so is the result of a row without keys
    tl.store(lse + base + head, (top + tl.log2(total)) * 0.6931471805599453, present)


@triton.jit
def join_kernel(
    parts: tl.tensor,
    part_lse: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    heads: int,
    LATENT: tl.constexpr,
    SPLITS: tl.constexpr,
) -> None:
    """Weighted mean of the parts of one token and head, by their log-sum-exp."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    split = tl.arange(0, SPLITS)
    latent = tl.arange(0, LATENT)
    cell = (token * SPLITS + split) * heads + head
    each = tl.load(part_lse + cell)
    top = tl.max(each, 0)
    shift = tl.where(top == float("-inf"), 0.0, top)
    weights = tl.exp(each - shift)
    total = tl.sum(weights, 0)
    part = tl.load(parts + cell[:, None] * LATENT + latent[None, :])
    joined = tl.sum(part * weights[:, None], 0) / tl.where(total > 0.0, total, 1.0)
    tl.store(out + (token * heads + head) * LATENT + latent, joined.to(out.dtype.element_ty))
    tl.store(lse + token * heads + head, top + tl.log(total))
