"""Rows of a padded step: on a GPU three kernels derive them, elsewhere functions of torch."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from dsa_compile.kernels.cuda import draft_rows as kernels
from dsa_compile.runtime.execution.draft_rows import (
    DraftedRows,
    RowState,
    SettledRows,
    corrected_rows,
)


def padded_rows(step: Mapping[str, Tensor], state: RowState, block_size: int) -> DraftedRows:
    """Take off what the step in flight did not yield, of a step that has a padded size."""
    if state.last.is_cuda:
        return launched_rows(step, state, block_size)
    return corrected_rows(step, state, block_size, flat=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchedRows(DraftedRows):
    """Rows whose methods launch kernels.

    Args:
        known: what the first kernel has read.
        started: what it has written.
        constants: of the size, which all steps share.
    """

    known: kernels.Known
    started: kernels.Started
    constants: Mapping[str, Tensor]

    def first_drafts(self, state: RowState) -> Tensor:
        """Memory for the drafts of the step; see :meth:`DraftedRows.first_drafts`."""
        return self.started.drafts

    def deeper(self, depth: int, block_size: int) -> tuple[dict[str, Tensor], Tensor]:
        """Inputs of the drafts of a depth, and options; see :meth:`DraftedRows.deeper`."""
        rows = self.started.deeper[depth - 2]
        values = _values(rows)
        values["cu_seqlens"] = self.constants["request_seqlens"]
        values["logit_rows"] = self.constants["every_request"]
        return values, rows.options

    def with_drafts(self, drafts: Tensor) -> Tensor:
        """Tokens with drafts in their places; see :meth:`DraftedRows.with_drafts`."""
        ids = self.started.ids
        return kernels.place_drafts(ids, self.last, drafts) if drafts.shape[1] else ids

    def grid_options(self) -> Tensor:
        """Records of sampling options of every row; see :meth:`DraftedRows.grid_options`."""
        return self.started.step.options

    def settle(
        self, state: RowState, sampled: Tensor, drafts: Tensor, per_thousand: int | None
    ) -> SettledRows:
        """Count the tokens that hold; see :meth:`DraftedRows.settle`."""
        assert state.last is self.known.last, "of the state that the step began with"
        found = kernels.settle_rows(
            sampled, drafts, per_thousand, self.started, self.known, self.following
        )
        return SettledRows(*found)


def launched_rows(step: Mapping[str, Tensor], state: RowState, block_size: int) -> LaunchedRows:
    """Variant of :func:`padded_rows` by a kernel."""
    known = kernels.Known(
        step["input_ids"],
        step["positions"],
        step["slot_mapping"],
        step["rows"],
        step["max_new"],
        step["options"],
        step["block_tables"],
        state.last,
        state.ends,
        state.first,
    )
    started = kernels.start_rows(known, block_size)
    values = {"input_ids": started.ids, **_values(started.step)}
    values["cu_seqlens"], values["logit_rows"] = step["cu_seqlens"], step["every_row"]
    grid_options = started.step.options.unflatten(0, step["places"].shape)
    return LaunchedRows(
        values,
        known.rows,
        step["places"],
        step["grid"],
        step["following"],
        known.tables,
        started.start,
        started.last,
        known.max_new,
        grid_options[:, 0],
        known=known,
        started=started,
        constants={name: step[name] for name in ("request_seqlens", "every_request")},
    )


def _values(rows: kernels.Rows) -> dict[str, Tensor]:
    """Inputs that a plan takes of some rows, by name."""
    return {
        "positions": rows.positions,
        "slot_mapping": rows.slots,
        "block_tables": rows.tables,
        "context_lens": rows.lengths,
    }
