"""Multi-head attention of whole prompts: keys and values of every head, made of latent rows.

The ops are for steps in which every request's tokens begin at position 0: the keys of a token are
tokens of the same step. Each token has a key and a value a head, ``[W_UK latent | rotated key]``
and ``W_UV latent``, so that a score costs ``dn + dr`` products and not the ``R + dr`` of absorbed
MLA (:mod:`dsa_compile.ops.attention`); DeepSeek-V2 (arXiv:2405.04434), section 2.1. A prompt longer
than ``index_topk`` attends to the tokens that its indexer selects: the others are masked, which
costs their products, and pays as long as those are few (DeepSeek-V3.2, arXiv:2512.02556, uses
masked multi-head attention for short prompts).

Latents are read from the cache, where the step has written them: what is attended to is what later
steps will attend to, in a quantised cache as well. Products and softmax are fp32; one rounding to
the query's dtype ends them.
"""

import torch
from torch import Tensor

from dsa_compile.ops.attention import GATHER_BYTES
from dsa_compile.ops.facts import CostFacts, Family, OpFacts, listed_rows, products
from dsa_compile.ops.latent_rows import latent_rows_fp8, latent_rows_fp8_tensor
from dsa_compile.ops.library import define


def paged_prompt_attention(
    q_nope: Tensor,
    q_pe: Tensor,
    cache: Tensor,
    slot_mapping: Tensor,
    positions: Tensor,
    w_uk: Tensor,
    w_uv: Tensor,
    scale: float,
    selected_slots: Tensor | None = None,
) -> Tensor:
    """Causal attention within each request, to the rows that the step has written.

    Args:
        q_nope: ``[T, H, dn]``, the part of the queries that is not rotated.
        q_pe: ``[T, H, dr]``, rotated.
        cache: ``[num_blocks, block_size, R + dr]``.
        slot_mapping: int64 ``[T]``, the physical row of each token; -1 for padding.
        positions: int64 ``[T]``, of each token in its request, whose tokens here begin at 0.
        w_uk: ``[H, dn, R]``.
        w_uv: ``[H, dv, R]``.
        scale: on the dot products.
        selected_slots: int32 ``[T, K]``, the physical rows that each token may attend to, -1 for
            none. A row of another request, or of a token behind, is left out. None for all of its
            request up to itself.

    Returns:
        ``[T, H, dv]``; zeros for padding, and for a token that attends to none.
    """
    rows = written_rows(cache, slot_mapping).float()
    unseen = _Unseen(cache, slot_mapping, positions, selected_slots)
    return _attend(q_nope, q_pe, rows, unseen, w_uk, w_uv, scale)


def finite_latents(latent: Tensor) -> Tensor:
    """Latents that values are made of: 0 in place of NaN and infinities.

    A value that a token does not attend to is multiplied by 0, which leaves the NaN of another
    request a NaN. A token that does attend to it has the NaN of the key for a score.

    Args:
        latent: ``[T, R]``.

    Returns:
        ``[T, R]``.
    """
    return latent.nan_to_num(0.0, 0.0, 0.0)


def written_rows(cache: Tensor, slot_mapping: Tensor) -> Tensor:
    """Rows of a cache that is not quantised; zeros for slots outside of it.

    Args:
        cache: ``[num_blocks, block_size, R + dr]``.
        slot_mapping: int64 ``[T]``.

    Returns:
        ``[T, R + dr]``.
    """
    held = cache.view(-1, cache.shape[2])
    absent = (slot_mapping < 0) | (slot_mapping >= len(held))
    picked = held.index_select(0, slot_mapping.masked_fill(absent, 0))
    return picked.masked_fill_(absent.unsqueeze(1), 0.0)


def paged_prompt_attention_fp8(
    q_nope: Tensor,
    q_pe: Tensor,
    cache: Tensor,
    slot_mapping: Tensor,
    positions: Tensor,
    w_uk: Tensor,
    w_uv: Tensor,
    scale: float,
    selected_slots: Tensor | None = None,
) -> Tensor:
    """:func:`paged_prompt_attention` to ``fp8`` rows.

    Args as there, and

    Args:
        cache: uint8 ``[num_blocks, block_size, fp8_row_bytes(R, dr)]``.
    """
    rows = latent_rows_fp8(cache, slot_mapping, w_uk.shape[2])
    unseen = _Unseen(cache, slot_mapping, positions, selected_slots)
    return _attend(q_nope, q_pe, rows, unseen, w_uk, w_uv, scale)


def paged_prompt_attention_fp8_tensor(
    q_nope: Tensor,
    q_pe: Tensor,
    cache: Tensor,
    slot_mapping: Tensor,
    positions: Tensor,
    w_uk: Tensor,
    w_uv: Tensor,
    scale: float,
    cache_scale: Tensor,
    selected_slots: Tensor | None = None,
) -> Tensor:
    """:func:`paged_prompt_attention` to rows of e4m3 under one scale.

    Args as there, and

    Args:
        cache: e4m3, or the same bytes as uint8, ``[num_blocks, block_size, R + dr]``.
        cache_scale: fp32 ``[1]``; a value is ``q * cache_scale``.
    """
    rows = latent_rows_fp8_tensor(cache, slot_mapping, cache_scale)
    unseen = _Unseen(cache, slot_mapping, positions, selected_slots)
    return _attend(q_nope, q_pe, rows, unseen, w_uk, w_uv, scale)


class _Unseen:
    """The tokens of a step that each of its tokens does not attend to.

    Args:
        cache: ``[num_blocks, block_size, ...]``.
        slot_mapping: int64 ``[T]``.
        positions: int64 ``[T]``.
        selected_slots: int32 ``[T, K]``, or None.
    """

    def __init__(
        self, cache: Tensor, slot_mapping: Tensor, positions: Tensor, slots: Tensor | None
    ) -> None:
        self._places = torch.arange(len(positions), device=positions.device)
        self._first = self._places - positions  # of each token's request
        self._padding = slot_mapping < 0
        self._chosen = None
        if slots is not None:
            nobody = len(positions)
            held = cache.shape[0] * cache.shape[1]
            # the last two are of slots that are padding and of those that name no row
            tokens = self._places.new_full((held + 2,), nobody)
            tokens[slot_mapping.masked_fill(self._padding, held)] = self._places
            none = (slots < 0) | (slots >= held)
            self._chosen = tokens[slots.masked_fill(none, held + 1)]

    def of(self, start: int, stop: int) -> Tensor:
        """Bool ``[stop - start, stop]``: queries by keys."""
        mine, keys = slice(start, stop), self._places[:stop]
        unseen = (keys < self._first[mine, None]) | (keys > self._places[mine, None])
        if self._chosen is not None:
            chosen = torch.zeros_like(unseen, dtype=torch.bool)
            chosen = torch.nn.functional.pad(chosen, (0, 1))  # for what is behind all
            chosen.scatter_(1, self._chosen[mine].clamp(max=stop), True)
            unseen |= ~chosen[:, :stop]
        return unseen | self._padding[mine, None]


def _attend(
    q_nope: Tensor,
    q_pe: Tensor,
    rows: Tensor,
    unseen: _Unseen,
    w_uk: Tensor,
    w_uv: Tensor,
    scale: float,
) -> Tensor:
    """Attend to fp32 rows ``[T, R + dr]``, a stretch of queries at a time."""
    tokens, heads, _ = q_nope.shape
    latent, k_pe = rows.split([w_uk.shape[2], q_pe.shape[2]], -1)
    k_nope = torch.matmul(latent, w_uk.float().transpose(1, 2))
    keys = torch.cat((k_nope, k_pe.expand(heads, -1, -1)), -1).transpose(1, 2)
    values = torch.matmul(finite_latents(latent), w_uv.float().transpose(1, 2))
    query = torch.cat((q_nope, q_pe), -1).transpose(0, 1).float()

    out = q_nope.new_empty((tokens, heads, w_uv.shape[1]))
    step = max(1, GATHER_BYTES // max(1, 4 * heads * tokens))
    for start in range(0, tokens, step):
        stop = min(start + step, tokens)
        mine, hidden = slice(start, stop), unseen.of(start, stop)
        logits = torch.matmul(query[:, mine], keys[:, :, :stop]).mul_(scale)
        weights = logits.masked_fill_(hidden, float("-inf")).softmax(-1)
        weights.masked_fill_(hidden.all(1, keepdim=True), 0.0)  # softmax of nothing
        out[mine] = torch.matmul(weights, values[:, :stop]).transpose(0, 1)
    return out


_ARGUMENTS = (
    "Tensor q_nope, Tensor q_pe, Tensor cache, Tensor slot_mapping, Tensor positions,"
    " Tensor w_uk, Tensor w_uv, float scale"
)
_QUERIES = "q_nope: f[T, H, dn], q_pe: q_nope[T, H, dr]"
_REST = "slot_mapping: i64[T], positions: i64[T], w_uk: q_nope[H, dn, R], w_uv: q_nope[H, dv, R]"
_SLOTS = "selected_slots: i32[T, K]"
_FACTS = OpFacts(
    Family.PROMPT_ATTENTION,
    skips="slot_mapping",
    cost=CostFacts(
        launches=4,
        fills=True,
        flops=products("w_uk", "w_uv"),
        reads={"cache": listed_rows("slot_mapping")},
    ),
)

PAGED_PROMPT_ATTENTION = define(
    f"paged_prompt_attention({_ARGUMENTS}, Tensor? selected_slots=None) -> Tensor",
    paged_prompt_attention,
    f"({_QUERIES}, cache: q_nope[P, bs, R + dr], {_REST}, {_SLOTS}) -> q_nope[T, H, dv]",
    _FACTS,
)
PAGED_PROMPT_ATTENTION_FP8 = define(
    f"paged_prompt_attention_fp8({_ARGUMENTS}, Tensor? selected_slots=None) -> Tensor",
    paged_prompt_attention_fp8,
    f"({_QUERIES}, cache: u8[P, bs, fp8_row_bytes(R, dr)], {_REST}, {_SLOTS}) -> q_nope[T, H, dv]",
    _FACTS,
)
PAGED_PROMPT_ATTENTION_FP8_TENSOR = define(
    f"paged_prompt_attention_fp8_tensor({_ARGUMENTS}, Tensor cache_scale,"
    " Tensor? selected_slots=None) -> Tensor",
    paged_prompt_attention_fp8_tensor,
    f"({_QUERIES}, cache: (e4m3 | u8)[P, bs, R + dr], {_REST}, cache_scale: f32[1],"
    f" {_SLOTS}) -> q_nope[T, H, dv]",
    _FACTS,
)
