"""Rows of a step with drafts, derived next to its tokens: nothing here reads a tensor on the host.

A step of a pipeline is laid out before the host knows how many tokens the step before it yielded.
So the host sends the most there can be, and these functions take off what was not yielded, put
drafts into their places, and find how many of them were right. Steps that are captured do the same
in fewer launches (:mod:`dsa_compile.runtime.execution.padded_rows`).

Names of sizes: T tokens of the step, R requests, Y requests that yield tokens, W the most tokens
that one of these may yield, C columns of the block table. Row ``y * W + j`` of the *grid* ``[Y,
W]`` is the ``j``-th token of request ``y`` from its last one on; drafts are those behind it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from dsa_compile.kernels.cuda.draft_rows import parts_apart
from dsa_compile.runtime.execution.idle_rows import IDLE, idle_where
from dsa_compile.runtime.execution.step_shape import DEEPER_FROM, StepShape
from dsa_compile.runtime.sampling.draw_options import STEP, options_at, options_of_drafts


@dataclass(frozen=True, slots=True)
class RowState:
    """State of the requests on the device, by row of the scheduler; the last row is no request's.

    Args:
        last: int64 ``[rows + 1]``, the token that a request's last step ended with.
        ends: int64 ``[rows + 1]``, the position of that token.
        first: int64 ``[rows + 1]``, the draft of the token behind it.
    """

    last: Tensor
    ends: Tensor
    first: Tensor

    @classmethod
    def empty(cls, rows: int, device: torch.device) -> "RowState":
        """The state before any step, for so many rows of the scheduler."""
        last, ends, first = torch.zeros(3, rows + 1, dtype=torch.int64, device=device)
        return cls(last, ends, first)


@dataclass(frozen=True, slots=True)
class SettledRows:
    """Results of checking a step's drafts.

    Args:
        outcome: int64 ``[Y, 1 + W]``, how many tokens count of each request, and its tokens.
        ends: int64 ``[Y]``, the place of the last one that counts among the step's tokens.
        following: int64 ``[T]``, the token behind each one of the step.
        options: int64 ``[Y, 5]``, records of sampling options for the drafts behind; they name the
            rows of :class:`RowState`.
    """

    outcome: Tensor
    ends: Tensor
    following: Tensor
    options: Tensor


@dataclass(frozen=True, slots=True)
class DraftedRows:
    """A step where its requests really are.

    Its methods are what a step does with its rows, here by the functions of this module;
    :mod:`dsa_compile.runtime.execution.padded_rows` has a GPU do the same in fewer launches.

    Args:
        values: what the model's plan takes, by name; ``input_ids`` are without drafts.
        rows: int64 ``[Y]``, by which :class:`RowState` is indexed.
        places: int64 ``[Y, W]``, of the grid among the step's tokens; that of a request's last row
            where it has less than W.
        grid: int64 ``[T]``, each token's row of the grid, or -1.
        following: int64 ``[T]``, the token behind each one as far as the host knew it, or -1.
        tables: int32 ``[Y, C]``, block tables of the requests.
        start: int64 ``[Y]``, the position of each one's last token.
        last: int64 ``[Y]``, that token.
        max_new: int64 ``[Y]``, rows of each in the grid.
        options: int64 ``[Y, 5]``, records of sampling options for that row.
        lanes: the shape that the step has on all lanes; None where it is that of these rows.
    """

    values: dict[str, Tensor]
    rows: Tensor
    places: Tensor
    grid: Tensor
    following: Tensor
    tables: Tensor
    start: Tensor
    last: Tensor
    max_new: Tensor
    options: Tensor
    lanes: StepShape | None = None

    @property
    def width(self) -> int:
        """Rows W of a request in the grid."""
        return self.places.shape[1]

    def first_drafts(self, state: RowState) -> Tensor:
        """Memory for the drafts of the step, int64 ``[W - 1, Y]``, with the first ones written.

        Those of a depth are inputs of kernels, some of which are compiled for where inputs begin.
        """
        drafts = parts_apart(self.width - 1, (len(self.rows),), self.start)
        drafts[0] = state.first[self.rows]
        return drafts

    def deeper(self, depth: int, block_size: int) -> tuple[dict[str, Tensor], Tensor]:
        """Inputs of the drafts of a depth, and records of sampling options for them.

        Returns:
            As :func:`deeper_rows`; and int64 ``[Y, 5]``, records that name each request's place
            among the Y.
        """
        every = torch.arange(len(self.rows), device=self.rows.device)
        options = options_of_drafts(self.options, depth - 1, every)
        return deeper_rows(self, depth, block_size), options

    def with_drafts(self, drafts: Tensor) -> Tensor:
        """Tokens of the step, int64 ``[T]``, with drafts ``[Y, W - 1]`` in their places."""
        ids = self.values["input_ids"]
        if drafts.shape[1] == 0:
            return ids
        tokens = torch.cat([self.last[:, None], drafts], 1).flatten()
        here = (self.grid >= 0) & (ids < 0)
        return torch.where(here, tokens[self.grid.clamp(min=0)], ids)

    def grid_options(self) -> Tensor:
        """Records of sampling options of every row of the grid, int64 ``[Y * W, 5]``."""
        ahead = torch.arange(self.width, device=self.places.device)
        each = self.options[:, None].expand(-1, self.width, -1)
        return options_at(each, ahead).view(-1, self.options.shape[1])

    def settle(
        self, state: RowState, sampled: Tensor, drafts: Tensor, per_thousand: int | None
    ) -> SettledRows:
        """Count the tokens that hold, and remember with which each request ends.

        Args:
            state: of the requests.
            sampled: int64 ``[Y, W]``, a token of every row, -1 of one that failed.
            drafts: int64 ``[Y, W - 1]``.
            per_thousand: as for :func:`force_count`; None to count those that are right.
        """
        if per_thousand is None:
            kept = count_right(sampled, drafts, self.max_new)
        else:
            kept = force_count(self, sampled, per_thousand)
        return self.settle_known(state, sampled, kept)

    def settle_known(self, state: RowState, sampled: Tensor, kept: Tensor) -> SettledRows:
        """Variant of :meth:`settle` with the number of tokens that count, int64 ``[Y]``."""
        keep(state, self, sampled, kept)
        return SettledRows(
            torch.cat([kept[:, None], sampled], 1),
            self.places.gather(1, kept[:, None] - 1)[:, 0],
            following_tokens(self, sampled),
            options_of_drafts(self.options, kept, self.rows),
        )


def corrected_rows(
    step: Mapping[str, Tensor], state: RowState, block_size: int, *, flat: bool
) -> DraftedRows:
    """Take off what the step in flight did not yield.

    Args:
        step: from :mod:`dsa_compile.runtime.execution.draft_inputs`. A request whose last token is
            -1 has positions that are too high by what is taken off here. A token whose slot is -1
            is padding.
        state: as the step before left it.
        block_size: rows of a cache page.
        flat: give every token the form of a request of its own.
    """
    ids, positions, places = step["input_ids"], step["positions"], step["places"]
    grid, owners, tables = step["grid"], step["owners"], step["block_tables"]
    rows, options, width = step["rows"], step["options"], places.shape[1]
    padding = step["slot_mapping"] < 0
    firsts = places[:, 0]
    start, last = positions[firsts], ids[firsts]
    if len(rows):
        unknown = last < 0
        excess = (start - state.ends[rows]) * unknown
        last = torch.where(unknown, state.last[rows], last)
        start = start - excess
        options = options.clone()
        options[:, STEP] -= excess
        here = grid.clamp(min=0) // width
        positions = positions - excess[here].masked_fill(grid < 0, 0)
        at_first = (grid >= 0) & (grid % width == 0)
        ids = torch.where(at_first, last[here], ids)
    positions = idle_where("positions", positions, padding)
    page = tables[owners, positions // block_size].long()
    values = {
        "input_ids": ids,
        "positions": positions,
        "slot_mapping": idle_where(
            "slot_mapping", page * block_size + positions % block_size, padding
        ),
        "cu_seqlens": step["cu_seqlens"],
    }
    if flat:
        values["block_tables"] = idle_where("block_tables", tables[owners], padding[:, None])
        values["context_lens"] = idle_where("context_lens", positions + 1, padding).int()
        values["logit_rows"] = step["every_row"]
    else:
        values["block_tables"] = tables
        ends = step["cu_seqlens"][1:] - 1
        values["context_lens"] = idle_where(
            "context_lens", positions[ends] + 1, padding[ends]
        ).int()
        values["logit_rows"] = places.flatten()
    mine = tables[owners[firsts]]
    return DraftedRows(
        values, rows, places, grid, step["following"], mine, start, last, step["max_new"], options
    )


def deeper_rows(rows: DraftedRows, depth: int, block_size: int) -> dict[str, Tensor]:
    """One token for each of Y requests, to draft the one that is ``depth`` behind its last.

    The cache row is that of the position from which the state comes, one before the token's own.
    Requests that want no such draft get padding.

    Returns:
        What the draft plan takes of a step, but the token and the state.
    """
    unwanted = rows.max_new <= depth
    positions = idle_where("positions", rows.start + (depth - 2), unwanted)
    page = rows.tables.gather(1, (positions // block_size)[:, None])[:, 0].long()
    count = len(positions)
    return {
        "positions": positions,
        "slot_mapping": idle_where(
            "slot_mapping", page * block_size + positions % block_size, unwanted
        ),
        "block_tables": idle_where("block_tables", rows.tables, unwanted[:, None]),
        "context_lens": idle_where("context_lens", positions + 1, unwanted).int(),
        "cu_seqlens": torch.arange(count + 1, dtype=torch.int32, device=positions.device),
        "logit_rows": torch.arange(count, device=positions.device),
    }


def count_right(sampled: Tensor, drafts: Tensor, max_new: Tensor) -> Tensor:
    """Number of tokens of each request that count: up to the first that is not its draft.

    Args:
        sampled: int64 ``[Y, W]``, a token of every row, -1 of one that failed.
        drafts: int64 ``[Y, W - 1]``.
        max_new: int64 ``[Y]``, rows of each request.

    Returns:
        int64 ``[Y]``, each from 1 to ``max_new``. A row that failed counts only as the first of its
        request; else the next step meets it there.
    """
    depths = torch.arange(1, sampled.shape[1], device=sampled.device)
    right = (sampled[:, :-1] == drafts) & (depths < max_new[:, None])
    kept = 1 + right.long().cumprod(1).sum(1)
    failed = sampled.gather(1, kept[:, None] - 1)[:, 0] < 0
    return kept - (failed & (kept > 1)).long()


def forced_lengths(counts: Tensor, per_thousand: int) -> Tensor:
    """Tokens that steps keep if ``per_thousand`` / 1000 are to be kept on average.

    The ``i``-th step of a request ends behind ``i * per_thousand // 1000`` tokens, so each keeps
    that average rounded down or up. A request that stands elsewhere goes on to the next such place.

    Args:
        counts: int64 ``[Y]``, tokens that each request has before the step, >= 1 as a prompt yields
            the first.
        per_thousand: >= 1000.

    Returns:
        int64 ``[Y]``, >= 1.
    """
    steps: Tensor = -(-(1000 * counts) // per_thousand)
    ends: Tensor = steps * per_thousand // 1000
    return ends - (counts - 1)


def force_count(rows: DraftedRows, sampled: Tensor, per_thousand: int) -> Tensor:
    """Variant of :func:`count_right` by forced lengths in place of drafts that are right.

    Args:
        rows: of the step.
        sampled: int64 ``[Y, W]``, a token of every row, -1 of one that failed; tokens count up to
            the first of these.
        per_thousand: as for :func:`forced_lengths`.
    """
    sound = (sampled >= 0).long().cumprod(1).sum(1)
    forced = forced_lengths(rows.options[:, STEP], per_thousand)
    return forced.minimum(rows.max_new).minimum(sound).clamp(min=1)


def keep(state: RowState, rows: DraftedRows, sampled: Tensor, kept: Tensor) -> None:
    """Remember with which token each request ends, and where."""
    ends = sampled.gather(1, kept[:, None] - 1)[:, 0]
    state.last[rows.rows] = ends.clamp(min=0)
    state.ends[rows.rows] = rows.start + kept


def following_tokens(rows: DraftedRows, sampled: Tensor) -> Tensor:
    """The token behind each token of a step, int64 ``[T]``; any behind one that does not count."""
    if not sampled.numel():
        return rows.following.clamp(min=0)
    new = sampled.flatten()[rows.grid.clamp(min=0)]
    unknown = (rows.following < 0) & (rows.grid >= 0)
    return torch.where(unknown, new, rows.following).clamp(min=0)


def rows_on_lanes(rows: DraftedRows, row: int, options: Tensor) -> DraftedRows:
    """The rows of deeper drafts as every lane has them: of as many requests, and as wide.

    Rows of nobody stand behind the lane's own requests, or alone where those want no such drafts.

    Args:
        rows: of the step, which knows its shape on all lanes.
        row: of the state, that is no request's.
        options: int64 ``[1, 5]``, a record of sampling options for it.

    Returns:
        Rows whose ``places`` mean nothing.
    """
    assert rows.lanes is not None, "of a step on several lanes"
    own = len(rows.rows) if rows.width >= DEEPER_FROM else 0
    nobodys = rows.rows.new_zeros(rows.lanes.drafting - own)
    return replace(
        rows,
        rows=torch.cat([rows.rows[:own], nobodys + row]),
        places=rows.places.new_zeros(rows.lanes.drafting, rows.lanes.width),
        tables=pad(rows.tables[:own], (0, 0, 0, len(nobodys)), value=IDLE["block_tables"]),
        start=torch.cat([rows.start[:own], nobodys]),
        last=torch.cat([rows.last[:own], nobodys]),
        max_new=torch.cat([rows.max_new[:own], nobodys + IDLE["max_new"]]),
        options=torch.cat([rows.options[:own], options.expand(len(nobodys), -1)]),
    )
