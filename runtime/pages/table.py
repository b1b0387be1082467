"""The block table: which blocks have the rows of each running request."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dsa_compile.runtime.scheduling.limits import SchedulerConfig


def cache_rows(
    tables: NDArray[np.int32],
    requests: NDArray[np.int64] | int,
    positions: NDArray[np.int64],
    block_size: int,
) -> NDArray[np.int64]:
    """The cache row ``block * block_size + offset`` of each token, int64 [T].

    Args:
        tables: int32 [R, M], block ids by position.
        requests: int64 [T], the row of ``tables`` that each token belongs to.
        positions: int64 [T], of each token within its request.
        block_size: rows of a block.
    """
    page, offset = np.divmod(positions, block_size)
    rows: NDArray[np.int64] = tables[requests, page].astype(np.int64) * block_size + offset
    return rows


@dataclass(frozen=True, slots=True, eq=False)
class BlockTable:
    """Block ids of running requests.

    Attributes:
        rows: int32 [rows, columns], by position, padded with -1.
        block_size: rows of one block.
    """

    rows: NDArray[np.int32]
    block_size: int

    @classmethod
    def of(cls, config: SchedulerConfig, lanes: int = 1) -> "BlockTable":
        """A table of blocks that no request holds yet, for the running ones of every lane."""
        columns = -(-min(config.max_model_len, config.capacity) // config.block_size)
        rows = np.full((lanes * config.max_num_seqs, columns), -1, np.int32)
        return cls(rows, config.block_size)

    def read(self, rows: NDArray[np.int64], tokens: int) -> NDArray[np.int32]:
        """A copy of some rows, int32 [R, M], as wide as a context of so many tokens needs."""
        return self.rows[rows, : -(-tokens // self.block_size)]
