"""Whole sequences as one step: what an evaluation runs, laid out as the runtime lays out a step."""

from collections.abc import Iterator, Sequence

import numpy as np

from dsa_compile.runtime.execution.batch import Batch, lay_out


def whole_batch(sequences: Sequence[Sequence[int]], tails: Sequence[int], block_size: int) -> Batch:
    """Batch of every token of every sequence in one step, each sequence in blocks of its own.

    Args:
        sequences: token ids, none of them empty.
        tails: how many of each sequence's last tokens want logits.
        block_size: rows of a cache page.
    """
    counts = np.array([len(sequence) for sequence in sequences])
    blocks = -(-counts // block_size)
    first = np.concatenate(([0], np.cumsum(blocks)[:-1]))
    columns = np.arange(int(blocks.max()))
    tables = np.where(columns < blocks[:, None], first[:, None] + columns, -1)
    ids = np.concatenate([np.asarray(sequence, np.int64) for sequence in sequences])
    starts, wanted = np.zeros_like(counts), np.array(tails, np.int64)
    return lay_out(ids, starts, counts, tables.astype(np.int32), block_size, wanted)


def packed(lengths: Sequence[int], block_size: int, budget: int) -> Iterator[slice]:
    """Cut a list of sequences into consecutive runs that fill at most ``budget`` cache rows.

    A sequence takes whole blocks; one longer than the budget has a run of its own.
    """
    start, used = 0, 0
    for index, length in enumerate(lengths):
        rows = -(-length // block_size) * block_size
        if index > start and used + rows > budget:
            yield slice(start, index)
            start, used = index, 0
        used += rows
    if start < len(lengths):
        yield slice(start, len(lengths))
