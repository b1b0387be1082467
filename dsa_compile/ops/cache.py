"""The paged caches: writing rows, and listing the rows of a whole context.

A cache is ``[num_blocks, block_size, width]``; the physical row of a slot is
``block * block_size + offset``, and slot -1 means "nowhere".
"""

import torch
from torch import Tensor

from dsa_compile.ops.facts import Family, OpFacts
from dsa_compile.ops.library import define


def write_latent_cache(ckv: Tensor, k_pe: Tensor, cache: Tensor, slot_mapping: Tensor) -> None:
    """Store each token's compressed KV and rotated shared key, in that order, in its row.

    Args:
        ckv: ``[T, R]``, normed.
        k_pe: ``[T, dr]``, rotated.
        cache: ``[num_blocks, block_size, R + dr]``, written in place.
        slot_mapping: int64 ``[T]``, distinct physical rows; tokens with -1 are skipped.
    """
    write_rows(torch.cat((ckv, k_pe), -1), cache, slot_mapping)


def write_index_cache(k: Tensor, cache: Tensor, slot_mapping: Tensor) -> None:
    """Store each token's indexer key in its row.

    Args:
        k: ``[T, D]``.
        cache: ``[num_blocks, block_size, D]``, written in place.
        slot_mapping: int64 ``[T]``, distinct physical rows; tokens with -1 are skipped.
    """
    write_rows(k, cache, slot_mapping)


def write_rows(values: Tensor, cache: Tensor, slot_mapping: Tensor) -> None:
    """Copy rows ``[T, width]`` of the cache's dtype to their slots; those with -1 are skipped."""
    kept = (slot_mapping >= 0).nonzero().squeeze(1)
    if len(kept) < len(slot_mapping):
        slot_mapping = slot_mapping.index_select(0, kept)
        values = values.index_select(0, kept)
    # view, not reshape: a cache that cannot be viewed as rows must fail, not be written as a copy
    cache.view(-1, cache.shape[2]).index_copy_(0, slot_mapping, values)


def block_rows(block_tables: Tensor, block_size: int, blocks: int) -> Tensor:
    """Physical rows of positions ``0 .. blocks*block_size - 1`` of every request.

    Args:
        block_tables: int32 ``[R, M]``, padded with -1.
        block_size: rows of one block.
        blocks: leading columns of the table to list, at most M.

    Returns:
        int32 ``[R, blocks * block_size]``; rows of absent blocks are negative.
    """
    offsets = torch.arange(block_size, dtype=torch.int32, device=block_tables.device)
    listed = block_tables[:, :blocks].unsqueeze(-1)
    return torch.add(offsets, listed, alpha=block_size).flatten(1)


def dense_slots(
    block_tables: Tensor,
    cu_seqlens: Tensor,
    context_lens: Tensor,
    positions: Tensor,
    block_size: int,
    width: int,
) -> Tensor:
    """Rows that every token sees, all in order of position: the short variant's "selection".

    Args:
        block_tables: int32 ``[R, M]``, padded with -1.
        cu_seqlens: int32 ``[R + 1]``, first token of each request and the end of the last.
        context_lens: int32 ``[R]``, tokens in the cache including this step's.
        positions: ``[T]``; gives the number of tokens.
        block_size: rows of one block.
        width: columns of the result; every token's position is below it.

    Returns:
        int32 ``[T, width]``: physical rows of positions ``0 .. position``, then -1. Tokens past
        ``cu_seqlens[-1]`` are padding and see nothing.
    """
    tokens = torch.arange(positions.shape[0], dtype=torch.int32, device=positions.device)
    if block_tables.shape[0] == 0:
        return tokens.new_full((positions.shape[0], width), -1)
    request = torch.searchsorted(cu_seqlens[1:], tokens, right=True)
    padding = request == block_tables.shape[0]
    request.clamp_(max=block_tables.shape[0] - 1)
    remaining = cu_seqlens[1:].index_select(0, request).sub_(tokens)
    position = context_lens.index_select(0, request).sub_(remaining).masked_fill_(padding, -1)

    blocks = min(-(-width // block_size), block_tables.shape[1])
    rows = block_rows(block_tables, block_size, blocks)[:, :width].index_select(0, request)
    columns = torch.arange(rows.shape[1], dtype=torch.int32, device=positions.device)
    rows.masked_fill_(columns > position.unsqueeze(1), -1)
    if rows.shape[1] == width:
        return rows
    return torch.nn.functional.pad(rows, (0, width - rows.shape[1]), value=-1)


WRITE_LATENT_CACHE = define(
    "write_latent_cache(Tensor ckv, Tensor k_pe, Tensor(a!) cache, Tensor slot_mapping) -> ()",
    write_latent_cache,
    "(ckv: f[T, R], k_pe: ckv[T, dr], cache: ckv[P, bs, R + dr], slot_mapping: i64[T]) -> ()",
    OpFacts(Family.CACHE_WRITE, skips="slot_mapping"),
    any_device=False,
)
WRITE_INDEX_CACHE = define(
    "write_index_cache(Tensor k, Tensor(a!) cache, Tensor slot_mapping) -> ()",
    write_index_cache,
    "(k: f[T, D], cache: k[P, bs, D], slot_mapping: i64[T]) -> ()",
    OpFacts(Family.CACHE_WRITE, skips="slot_mapping"),
    any_device=False,
)
DENSE_SLOTS = define(
    "dense_slots(Tensor block_tables, Tensor cu_seqlens, Tensor context_lens, Tensor positions,"
    " int block_size, int width) -> Tensor",
    dense_slots,
    "(block_tables: i32[R, M], cu_seqlens: i32[R + 1], context_lens: i32[R],"
    " positions: int[T]) -> i32[T, width]",
    OpFacts(Family.DENSE_SELECTION),
    where=(
        "block_size > 0",
        "width > 0",
    ),
)
