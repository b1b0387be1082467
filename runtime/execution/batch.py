"""The tensors of one step, as numpy arrays, built without a Python loop over tokens."""

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsa_compile.runtime.pages.table import cache_rows
from dsa_compile.runtime.scheduling.step import Phase, ScheduledStep


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """One step of T tokens over R requests; a request's tokens are contiguous and in order.

    An input id of -1 stands for a token that the host does not know: one that a step in flight
    yields, or a draft. A runner keeps them by the request's row of the scheduler. Where a request's
    first token here is -1 and steps may yield several, the host does not know either how many came
    before it: its positions, slots and context length are then those of the most there can be, and
    the runner takes off what was not yielded. The block table covers both.

    Args:
        input_ids: int64 [T].
        positions: int64 [T], counted from the request's first token.
        slot_mapping: int64 [T], the cache row ``block * block_size + offset`` each token writes.
        block_tables: int32 [R, M], block ids by position, padded with -1.
        cu_seqlens: int32 [R + 1], where each request's tokens start, and T.
        context_lens: int32 [R], tokens in the cache once this step is done.
        logit_rows: int64 [N], the tokens whose logits are wanted.
        request_rows: int32 [R], each request's row of the scheduler.
        tokens_each: tokens of each request where all decode, as many each; else None.
    """

    input_ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    slot_mapping: NDArray[np.int64]
    block_tables: NDArray[np.int32]
    cu_seqlens: NDArray[np.int32]
    context_lens: NDArray[np.int32]
    logit_rows: NDArray[np.int64]
    request_rows: NDArray[np.int32]
    tokens_each: int | None = None

    @property
    def num_tokens(self) -> int:
        """Number of tokens T."""
        return len(self.input_ids)

    @property
    def num_requests(self) -> int:
        """Number of requests R."""
        return len(self.context_lens)

    @property
    def token_rows(self) -> NDArray[np.int32]:
        """The row of the scheduler of each token's request, int32 [T]; -1 of tokens of none."""
        if self.tokens_each == 1 and self.num_tokens == self.num_requests:
            return self.request_rows
        rows = np.full(self.num_tokens, -1, np.int32)
        rows[: self.cu_seqlens[-1]] = np.repeat(self.request_rows, np.diff(self.cu_seqlens))
        return rows

    def arrays(self) -> dict[str, NDArray[Any]]:
        """The arrays by name."""
        return {name: getattr(self, name) for name in _ARRAYS}

    def is_short(self, topk: int) -> bool:
        """Whether no request's context exceeds ``topk``, so that a top-k would keep every key."""
        return not self.num_requests or int(self.context_lens.max()) <= topk

    def is_prompts(self) -> bool:
        """Whether every request's tokens begin at position 0."""
        return np.array_equal(self.context_lens, np.diff(self.cu_seqlens))


_ARRAYS = tuple(field.name for field in fields(Batch) if field.name != "tokens_each")


def build_batch(step: ScheduledStep) -> Batch:
    """Lay out a step that has at least one entry."""
    entries = step.entries
    assert entries, "an empty step has no batch"
    requests, first, lengths, most, phases = zip(*entries, strict=True)
    starts, counts = np.array(first), np.array(lengths)
    rows = np.array([request.row for request in requests])
    alike = phases.count(Phase.DECODE) == lengths.count(lengths[0]) == len(entries)
    tokens_each = lengths[0] if alike else None
    if tokens_each == 1:  # no ragged expansion
        known = [r.token_ids.item(start) for r, start in zip(requests, first, strict=True)]
        input_ids = np.array(known, np.int64)
    else:
        input_ids = np.concatenate(
            [r.token_ids[start : start + n] for r, start, n, _, _ in entries]
        )
    tables = step.table.read(rows, int((starts + counts).max()))
    size = step.table.block_size
    return lay_out(input_ids, starts, counts, tables, size, np.array(most), tokens_each, rows)


def lay_out(
    input_ids: NDArray[np.int64],
    starts: NDArray[np.int64],
    counts: NDArray[np.int64],
    block_tables: NDArray[np.int32],
    block_size: int,
    wanted: NDArray[np.int64],
    tokens_each: int | None = None,
    rows: NDArray[np.int64] | None = None,
) -> Batch:
    """The batch of some tokens.

    Args:
        input_ids: see :class:`Batch`.
        starts: int64 [R], each request's first position in the step.
        counts: int64 [R], its tokens.
        block_tables: see :class:`Batch`.
        block_size: rows of a block.
        wanted: int64 [R], how many of its last tokens' logits are wanted.
        tokens_each: see :class:`Batch`.
        rows: int64 [R], each request's row of the scheduler; None for 0, 1, ….
    """
    cu_seqlens = np.zeros(len(starts) + 1, np.int64)
    np.cumsum(counts, out=cu_seqlens[1:])
    if tokens_each == 1:
        positions, request = starts, np.arange(len(starts))
    else:
        request = np.repeat(np.arange(len(starts)), counts)
        positions = np.arange(len(input_ids)) + np.repeat(starts - cu_seqlens[:-1], counts)
    ends = cu_seqlens[1:]
    return Batch(
        input_ids=input_ids,
        positions=positions,
        slot_mapping=cache_rows(block_tables, request, positions, block_size),
        block_tables=block_tables,
        cu_seqlens=cu_seqlens.astype(np.int32),
        context_lens=(starts + counts).astype(np.int32),
        logit_rows=_last(ends, wanted) if wanted.max() > 1 else (ends - 1)[wanted > 0],
        request_rows=(np.arange(len(starts)) if rows is None else rows).astype(np.int32),
        tokens_each=tokens_each,
    )


def next_ids(step: ScheduledStep) -> list[int]:
    """Token behind those that each request of a step computes; -1 if it is unknown."""
    return [entry.request.token_ids.item(entry.start + entry.num_tokens) for entry in step.entries]


def _last(ends: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """The last ``counts[i]`` numbers below each of ``ends``, int64 [sum of counts]."""
    yielding = counts > 0
    ends, counts = ends[yielding], counts[yielding]
    before = np.cumsum(counts)
    return np.repeat(ends - before, counts) + np.arange(before[-1] if len(before) else 0)
