"""The draft plans of an artifact, run along with the model's steps, and what they hand on."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dsa_compile.ir.execution import BoundCall
from dsa_compile.ir.plan import DEEPER, DRAFT, LONG, PROMPTS, Plan
from dsa_compile.ir.region import Region, open_values
from dsa_compile.runtime.execution.draft_inputs import nobodys_options
from dsa_compile.runtime.execution.draft_rows import (
    DraftedRows,
    RowState,
    SettledRows,
    rows_on_lanes,
)
from dsa_compile.runtime.execution.step_shape import DEEPER_FROM
from dsa_compile.runtime.sampling.draw_options import sample_into

LOGITS = "logits"
Values = dict[str, Any]
Calls = Mapping[str, Sequence[BoundCall]]


class Drafter:
    """Makes drafts where the tokens are; waits for nothing and reads nothing on the host.

    Drafts are drawn with the random numbers of the tokens that they stand for, from temperature and
    filters alone: what else changes a request's logits depends on tokens that are guesses here.

    Args:
        plans: of the artifact.
        regions: its graphs by name.
        calls: binds the calls of a plan, for each variant.
        run: runs a plan of some calls on a step's values, for a variant; see
            :class:`~dsa_compile.runtime.execution.model_runner.ModelRunner`.
        state: of the rows of the scheduler.
        block_size: rows of a cache page.

    Attributes:
        carried: names of the values that go from the model to the first draft, and from draft to
            draft.
        states: of these, the values behind the first draft, by row of the scheduler; and what all
            deeper drafts of a step take of the first one, such as the cache rows it selected.
        observer: called with a depth, from 1, and the carried values ``[Y, …]`` of its drafts, for
            the Y requests of a step that yield tokens. None: not called.
    """

    def __init__(
        self,
        plans: Mapping[str, Plan],
        regions: Mapping[str, Region],
        calls: Callable[[Plan], Calls],
        run: Callable[[Calls, Plan, Values, str], None],
        state: RowState,
        block_size: int,
    ) -> None:
        self._plans = plans
        self._calls = {name: calls(plans[name]) for name in (DRAFT, DEEPER)}
        self._run_calls = run
        self._state = state
        self._block_size = block_size
        self._nobody = torch.from_numpy(nobodys_options()).to(state.first.device)
        self.observer: Callable[[int, Mapping[str, Tensor]], None] | None = None
        taken = {
            name: open_values(
                regions.get(f"{call.kind}.{LONG}") or regions[call.kind]
                for call in plans[name].calls
            )
            for name in (DRAFT, DEEPER)
        }
        self.carried = tuple(taken[DRAFT])
        self.states = {
            key: _nothing(node.meta["val"], len(state.first), state.first.device)
            for key, node in taken[DEEPER].items()
        }

    def drafts_of(self, rows: DraftedRows, variant: str) -> Tensor:
        """Drafts of a step, int64 ``[Y, W - 1]``, on whose depths all lanes meet."""
        lanes = rows.lanes
        if lanes is None or not lanes.drafting:
            return self.deepen(rows, variant)
        nobody = len(self._state.first) - 1
        drafts = self.deepen(rows_on_lanes(rows, nobody, self._nobody), variant)
        if rows.width < DEEPER_FROM:  # the lane met the others with rows of nobody
            return self.deepen(rows, variant)
        return drafts[: len(rows.rows), : rows.width - 1]

    def deepen(self, rows: DraftedRows, variant: str) -> Tensor:
        """Drafts of a step, int64 ``[Y, W - 1]``: the first, and those made from its state."""
        if rows.width == 1:
            return rows.places[:, 1:]
        drafts = rows.first_drafts(self._state)
        states = {key: kept[rows.rows] for key, kept in self.states.items() if rows.width > 2}
        for depth in range(2, rows.width):
            values: Values
            values, options = rows.deeper(depth, self._block_size)
            values |= {"input_ids": drafts[depth - 2], **states}
            self._run(DEEPER, values, PROMPTS.get(variant, variant))
            made = {key: values[key] for key in self.carried}
            if self.observer is not None:
                self.observer(depth, made)
            states |= made
            sample_into(drafts[depth - 1], values[LOGITS], options)
        return drafts.T

    def begin(self, rows: DraftedRows, values: Values, variant: str, settled: SettledRows) -> None:
        """Write the draft layer's rows of a step, and make the first drafts of the next one."""
        ends = settled.ends
        values["input_ids"] = settled.following
        values["logit_rows"] = ends
        self._run(DRAFT, values, variant)
        if not len(ends):
            return
        first = {key: values[key][ends] for key in self.states}
        for key, states in self.states.items():
            states[rows.rows] = first[key]
        if self.observer is not None:
            self.observer(1, {key: first[key] for key in self.carried})
        sample_into(self._state.first, values[LOGITS], settled.options)

    def _run(self, plan: str, values: Values, variant: str) -> None:
        self._run_calls(self._calls[plan], self._plans[plan], values, variant)


def _nothing(value: Tensor, rows: int, device: torch.device) -> Tensor:
    """Blank rows of a value ``[T, …]``: zeros, or of whole numbers -1, which is no cache row."""
    fill = 0 if value.dtype.is_floating_point else -1
    return torch.full((rows, *value.shape[1:]), fill, dtype=value.dtype, device=device)
