"""Device code of :mod:`dsa_compile.kernels.triton.prompt_attention`."""

import triton
import triton.language as tl


@triton.jit
def _scores_and_values(
    acc: tl.tensor,
    top: tl.tensor,
    total: tl.tensor,
    q: tl.tensor,
    pe: tl.tensor,
    row: tl.tensor,
    first: tl.tensor,
    start: int,
    k: tl.tensor,
    k_pe: tl.tensor,
    v: tl.tensor,
    k_tiles: tl.tensor_descriptor,
    pe_tiles: tl.tensor_descriptor,
    v_tiles: tl.tensor_descriptor,
    selected: tl.tensor,
    head: int,
    heads: int,
    row_stride: int,
    tokens: int,
    scale_log2: float,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    VALUES: tl.constexpr,
    PAD_NOPE: tl.constexpr,
    PAD_ROPE: tl.constexpr,
    PAD_VALUES: tl.constexpr,
    KEYS: tl.constexpr,
    LATENT: tl.constexpr,
    TILES: tl.constexpr,
    SELECTED: tl.constexpr,
    MASKED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """One step of the softmax: the keys ``start .. start + KEYS`` of one head.

    ``selected`` points to each query's bits of all keys, in words of 32, which decide if
    ``SELECTED``. They are loaded a word a query, and not a bit a key.
    """
    key = start + tl.arange(0, KEYS)
    known = (key < tokens)[:, None]
    nope, rope, value = tl.arange(0, PAD_NOPE), tl.arange(0, PAD_ROPE), tl.arange(0, PAD_VALUES)
    at = key.to(tl.int64)[:, None]
    if TILES:
        keys = k_tiles.load([start, head * NOPE])
    else:
        inside = known if PAD_NOPE == NOPE else known & (nope < NOPE)[None, :]
        keys = tl.load(k + at * (heads * NOPE) + head * NOPE + nope[None, :], inside, 0.0)
    scores = tl.dot(q, tl.trans(keys), input_precision="ieee")
    if ROPE:
        if TILES:
            turned = pe_tiles.load([start, LATENT])
        else:
            inside = known if PAD_ROPE == ROPE else known & (rope < ROPE)[None, :]
            turned = tl.load(k_pe + at * row_stride + rope[None, :], inside, 0.0)
        scores = tl.dot(pe, tl.trans(turned), scores, input_precision="ieee")
    scores *= scale_log2
    if SELECTED:
        place = tl.arange(0, KEYS)[None, :]
        word = tl.load(selected + start // 32, row < tokens, 0)[:, None]
        if KEYS == 64:
            second = tl.load(selected + start // 32 + 1, row < tokens, 0)[:, None]
            word = tl.where(place < 32, word, second)
        seen = ((word >> ((start + place) & 31)) & 1) != 0
        scores = tl.where(seen, scores, float("-inf"))
    elif MASKED:
        seen = (key[None, :] >= first[:, None]) & (key[None, :] <= row[:, None])
        scores = tl.where(seen, scores, float("-inf"))
    new = tl.maximum(top, tl.max(scores, 1))
    shift = tl.where(new == float("-inf"), 0.0, new) if MASKED or SELECTED else new
    weights = tl.exp2(scores - shift[:, None])
    decay = tl.exp2(top - shift)
    total = total * decay + tl.sum(weights, 1)
    if TILES:
        values = v_tiles.load([start, head * VALUES])
    else:
        inside = known if PAD_VALUES == VALUES else known & (value < VALUES)[None, :]
        values = tl.load(v + at * (heads * VALUES) + head * VALUES + value[None, :], inside, 0.0)
    acc = tl.dot(weights.to(values.dtype), values, acc * decay[:, None], input_precision="ieee")
    return acc, new, total


@triton.jit(do_not_specialize=["words", "begin", "tokens"])
def attend_prompt_kernel(
    q_nope: tl.tensor,
    q_pe: tl.tensor,
    k: tl.tensor,
    k_pe: tl.tensor,
    v: tl.tensor,
    k_tiles: tl.tensor_descriptor,
    pe_tiles: tl.tensor_descriptor,
    v_tiles: tl.tensor_descriptor,
    slot_mapping: tl.tensor,
    positions: tl.tensor,
    selected: tl.tensor,
    out: tl.tensor,
    q_token: int,
    q_head: int,
    pe_token: int,
    pe_head: int,
    row_stride: int,
    words: int,
    begin: int,
    tokens: int,
    heads: int,
    scale_log2: float,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    VALUES: tl.constexpr,
    PAD_NOPE: tl.constexpr,
    PAD_ROPE: tl.constexpr,
    PAD_VALUES: tl.constexpr,
    LATENT: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    GROUP: tl.constexpr,
    TILES: tl.constexpr,
    SELECTED: tl.constexpr,
) -> None:
    """Rows of ``QUERIES`` tokens of one head, of the tokens from ``begin`` up to ``tokens``.

    Heads take turns ``GROUP`` at a time, so that their keys stay in the L2 cache; of these the last
    tokens, which see the most keys, come first.

    If ``TILES``, keys and values come through tensor descriptors, else through ``k``, ``k_pe`` and
    ``v``.

    If ``SELECTED``, a query sees the keys whose bits are set in its row of ``selected``, int32
    ``[tokens - begin, words]``; else those of its request up to itself.
    """
    blocks = tl.cdiv(tokens - begin, QUERIES)
    group = tl.program_id(0) // (GROUP * blocks)
    place = tl.program_id(0) % (GROUP * blocks)
    head = group * GROUP + place % GROUP
    mine = begin + (blocks - 1 - place // GROUP) * QUERIES

    row = mine + tl.arange(0, QUERIES)
    present = row < tokens
    at = row.to(tl.int64)[:, None]
    nope, rope, value = tl.arange(0, PAD_NOPE), tl.arange(0, PAD_ROPE), tl.arange(0, PAD_VALUES)
    inside = present[:, None] & (nope < NOPE)[None, :]
    q = tl.load(q_nope + at * q_token + head * q_head + nope[None, :], inside, 0.0)
    inside = present[:, None] & (rope < ROPE)[None, :]
    pe = tl.load(q_pe + at * pe_token + head * pe_head + rope[None, :], inside, 0.0)
    first = row - tl.load(positions + row, present, 0).to(tl.int32)
    first = tl.maximum(first, 0)

    top = tl.full((QUERIES,), float("-inf"), tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    acc = tl.zeros((QUERIES, PAD_VALUES), tl.float32)
    # keys that some queries see, then those that all see, then those at or behind the first query
    lowest = tl.min(tl.where(present, first, mine), 0) // KEYS * KEYS
    common = tl.minimum(tl.cdiv(tl.max(tl.where(present, first, 0), 0), KEYS) * KEYS, mine)
    bits = selected + (row - begin).to(tl.int64) * words
    if not SELECTED:
        for start in range(lowest, common, KEYS):
            acc, top, total = _scores_and_values(
                acc, top, total, q, pe, row, first, start, k, k_pe, v, k_tiles, pe_tiles, v_tiles,
                bits, head, heads, row_stride, tokens, scale_log2, NOPE, ROPE, VALUES, PAD_NOPE,
                PAD_ROPE, PAD_VALUES, KEYS, LATENT, TILES, SELECTED, True,
            )  # fmt: skip
        for start in range(common, mine, KEYS):
            acc, top, total = _scores_and_values(
                acc, top, total, q, pe, row, first, start, k, k_pe, v, k_tiles, pe_tiles, v_tiles,
                bits, head, heads, row_stride, tokens, scale_log2, NOPE, ROPE, VALUES, PAD_NOPE,
                PAD_ROPE, PAD_VALUES, KEYS, LATENT, TILES, SELECTED, False,
            )  # fmt: skip
    for start in range(lowest if SELECTED else mine, tl.minimum(mine + QUERIES, tokens), KEYS):
        acc, top, total = _scores_and_values(
            acc, top, total, q, pe, row, first, start, k, k_pe, v, k_tiles, pe_tiles, v_tiles, bits,
            head, heads, row_stride, tokens, scale_log2, NOPE, ROPE, VALUES, PAD_NOPE, PAD_ROPE,
            PAD_VALUES, KEYS, LATENT, TILES, SELECTED, True,
        )  # fmt: skip

    slot = tl.load(slot_mapping + row, present, -1)
    any_seen = (slot >= 0) & (total != 0.0)  # NaN passes
    share = tl.where(any_seen, 1.0 / total, 0.0)
    result = tl.where(any_seen[:, None], acc * share[:, None], 0.0).to(out.dtype.element_ty)
    inside = present[:, None] & (value < VALUES)[None, :]
    tl.store(out + (at * heads + head) * VALUES + value[None, :], result, inside)
