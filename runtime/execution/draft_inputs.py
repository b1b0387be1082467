"""Host inputs of a step with drafts, ragged or padded to a size that a graph has."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dsa_compile.kernels.cuda.sample_tokens import OPTIONS
from dsa_compile.runtime.execution.idle_rows import IDLE
from dsa_compile.runtime.execution.pinned_staging import Layout
from dsa_compile.runtime.execution.runner import StepInputs

Arrays = dict[str, NDArray[Any]]
_WORDS = OPTIONS.itemsize // 8


def ragged_inputs(inputs: StepInputs, options: NDArray[np.void], nobody: int) -> Arrays:
    """A step of any form.

    Args:
        inputs: the step; its batch may end with tokens of no request.
        options: of the requests that yield tokens, [Y].
        nobody: row of the state that is no request's.

    Returns:
        By name, as :mod:`dsa_compile.runtime.execution.draft_rows` takes them.
    """
    batch = inputs.batch
    counts = np.diff(batch.cu_seqlens)
    owners = np.zeros(batch.num_tokens, np.int64)  # of tokens of nobody too
    owners[: batch.cu_seqlens[-1]] = np.repeat(np.arange(batch.num_requests), counts)
    index = _places_of(inputs, nobody)
    max_new = np.array(inputs.max_new, np.int64)
    width = int(max_new.max(initial=1))
    firsts = batch.cu_seqlens[index + 1] - max_new
    places = firsts[:, None] + np.minimum(np.arange(width), max_new[:, None] - 1)
    inside = np.arange(width) < max_new[:, None]
    grid = np.full(batch.num_tokens, -1, np.int64)
    grid[places[inside]] = np.flatnonzero(inside)
    following = np.empty_like(batch.input_ids)
    following[:-1] = batch.input_ids[1:]
    following[-1] = -1  # of nobody, unless a request ends there
    following[batch.cu_seqlens[1:] - 1] = inputs.next_ids or -1
    following[places[inside]] = -1
    return {
        "input_ids": batch.input_ids,
        "positions": batch.positions,
        "slot_mapping": batch.slot_mapping,
        "block_tables": batch.block_tables,
        "cu_seqlens": batch.cu_seqlens,
        "owners": owners,
        "grid": grid,
        "places": places.astype(np.int64),
        "following": following,
        "rows": np.array(inputs.rows, np.int64),
        "max_new": max_new,
        "options": _words(options),
    }


def fits_padded(inputs: StepInputs) -> bool:
    """Whether every request of a step yields tokens with all it computes, or computes just one."""
    batch = inputs.batch
    single = batch.num_requests - len(inputs.rows)
    return batch.num_tokens == sum(inputs.max_new) + single


class PaddedInputs:
    """Inputs that the host sends for a padded step: ``width`` rows for each of so many requests.

    The rows of a request that wants fewer than there are are idle, too. A request that yields
    nothing is computed as if it did, and remembered in a row of no request.

    Args:
        requests: rows of the block table.
        width: tokens of each.
        columns: of the block table.
        nobody: row of the state that is no request's.

    Attributes:
        layout: of what is sent.
    """

    def __init__(self, requests: int, width: int, columns: int, nobody: int) -> None:
        tokens = requests * width
        self.layout = Layout(
            {
                "input_ids": ((tokens,), np.int64),
                "positions": ((tokens,), np.int64),
                "slot_mapping": ((tokens,), np.int64),
                "following": ((tokens,), np.int64),
                "rows": ((requests,), np.int64),
                "max_new": ((requests,), np.int64),
                "options": ((requests, _WORDS), np.int64),
                "block_tables": ((requests, columns), np.int32),
            }
        )
        self._requests, self._width, self._nobody = requests, width, nobody
        # All but the block tables, which may be large and are behind the rest.
        padding = np.zeros(self.layout.nbytes, np.uint8)
        views = self.layout.in_numpy(padding)
        for name in views.keys() & IDLE.keys():
            views[name].fill(IDLE[name])
        views["rows"].fill(nobody)
        views["options"][:] = nobodys_options()
        self._padding = padding[: self.layout.places["block_tables"].start].copy()

    @property
    def nbytes(self) -> int:
        """Bytes of a step."""
        return self.layout.nbytes

    def in_numpy(self, buffer: NDArray[np.uint8]) -> "PaddedMemory":
        """Views through which a buffer on the host is filled with a step."""
        views = self.layout.in_numpy(buffer)
        return PaddedMemory(
            buffer[: len(self._padding)],
            views,
            views["following"].reshape(-1, self._width)[:, 0],
            views["options"].view(np.int32)[:, 0],
        )

    def constants(self, device: torch.device) -> dict[str, Tensor]:
        """Constants that all steps of this size share, by name."""
        requests, width = self._requests, self._width
        every = torch.arange(requests * width, device=device)
        return {
            "owners": every // width,
            "grid": every,
            "places": every.view(requests, width),
            "every_row": every,
            "every_request": every[:requests],
            "request_seqlens": torch.arange(requests + 1, dtype=torch.int32, device=device),
            "cu_seqlens": torch.arange(requests * width + 1, dtype=torch.int32, device=device),
        }

    def write(
        self,
        memory: "PaddedMemory",
        inputs: StepInputs | None = None,
        options: NDArray[np.void] | None = None,
    ) -> Sequence[int]:
        """Fill the memory of a step.

        Args:
            memory: from :meth:`in_numpy`.
            inputs: a step that fits (:func:`fits_padded`); None for padding only.
            options: of its requests that yield, [Y].

        Returns:
            [Y], the places of the requests that yield among those of the step.
        """
        memory.head[:] = self._padding
        views = memory.views
        tables = views["block_tables"]
        if inputs is None or options is None:
            tables.fill(IDLE["block_tables"])
            return ()
        batch, width = inputs.batch, self._width
        requests, columns = batch.block_tables.shape
        filled: slice | NDArray[np.int64] = slice(0, batch.num_tokens)
        if batch.tokens_each != width:
            counts = np.diff(batch.cu_seqlens)
            grid = np.arange(requests * width).reshape(requests, width)
            filled = grid[np.arange(width) < counts[:, None]]
        views["input_ids"][filled] = batch.input_ids
        views["positions"][filled] = batch.positions
        views["slot_mapping"][filled] = batch.slot_mapping
        index: slice | NDArray[np.int64] = slice(0, requests)
        places: Sequence[int] = range(requests)
        if len(inputs.rows) < requests:
            index = _places_of(inputs, self._nobody)
            places = index.tolist()
            silent = np.ones(requests, bool)
            silent[index] = False
            memory.first_following[:requests][silent] = np.array(inputs.next_ids, np.int64)[silent]
        views["rows"][index] = inputs.rows
        views["max_new"][index] = inputs.max_new
        views["options"][index] = options.view(np.int64).reshape(-1, _WORDS)
        memory.named_rows[index] = -1
        tables[:requests, :columns] = batch.block_tables
        tables[:requests, columns:] = IDLE["block_tables"]
        tables[requests:] = IDLE["block_tables"]
        return places


@dataclass(frozen=True, slots=True)
class PaddedMemory:
    """Views of the host's buffer of a padded step; see :class:`PaddedInputs`.

    Attributes:
        head: uint8, everything before the block tables.
        views: the arrays by name.
        first_following: int64, the token behind the first row of each request.
        named_rows: int32, the entry that each record of sampling options names.
    """

    head: NDArray[np.uint8]
    views: Arrays
    first_following: NDArray[np.int64]
    named_rows: NDArray[np.int32]


def _places_of(inputs: StepInputs, rows: int) -> NDArray[np.int64]:
    """The places of the requests that yield among all requests of a step, [Y]."""
    place = np.zeros(rows + 1, np.int64)
    place[inputs.batch.request_rows] = np.arange(inputs.batch.num_requests)
    return place[np.array(inputs.rows, np.int64)]


def nobodys_options() -> NDArray[np.int64]:
    """The record of sampling options of a row that is no request's, int64 ``[1, 5]``."""
    return _words(np.zeros(1, OPTIONS))


def _words(options: NDArray[np.void]) -> NDArray[np.int64]:
    """Records as words of 64 bits, ``[Y, 5]``, that name no row for a kernel to write."""
    made = np.array(options)
    made["row"] = -1
    return made.view(np.int64).reshape(len(made), _WORDS)
