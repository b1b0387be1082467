"""The runtime's drafting runner in exact arithmetic, with a record of what its steps drafted."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from dsa_compile.artifact.manifest import Manifest
from dsa_compile.ir.execution import BoundCall
from dsa_compile.ir.plan import Plan
from dsa_compile.ir.program import Program
from dsa_compile.runtime.execution.draft_rows import DraftedRows
from dsa_compile.runtime.execution.drafter import Values
from dsa_compile.runtime.execution.drafting_runner import DraftingRunner
from dsa_compile.runtime.execution.model_runner import LOGITS
from dsa_compile.verify.execution.exact import numbers, to_exact
from dsa_compile.verify.execution.exact_runner import ExactSteps, exact_caches, exact_parts
from dsa_compile.verify.inputs.exact_weights import ExactWeightStore


@dataclass(frozen=True)
class CheckedDrafts:
    """Drafts that a step checked of one request.

    Attributes:
        end: the position of the request's last token, behind which they stand.
        tokens: the drafts.
    """

    end: int
    tokens: tuple[int, ...]


class ExactDraftingRunner(ExactSteps, DraftingRunner):
    """A runner that drafts, whose numbers are exact.

    Args:
        manifest: of the artifact.
        program: finished.
        store: gives the weights.
        num_blocks: blocks of each cache.
        max_running: most requests of a step.
        deterministic: pad decode steps as a deterministic engine does.
        num_drafts: of a request in a step, at most.
        planned: whether the artifact's draft plans make them; else the host looks them up.

    Attributes:
        checked: the drafts, perhaps none, of each request in every step so far.
    """

    def __init__(
        self,
        manifest: Manifest,
        program: Program,
        store: ExactWeightStore,
        num_blocks: int,
        max_running: int,
        deterministic: bool = False,
        *,
        num_drafts: int,
        planned: bool,
    ) -> None:
        super().__init__(
            *exact_parts(manifest, program, store), num_blocks, max_running, deterministic,
            caches=exact_caches(manifest, num_blocks), num_drafts=num_drafts,
            plans=manifest.plans if planned else None,
        )  # fmt: skip
        self.checked: list[CheckedDrafts] = []
        if self.drafter is not None:
            self.drafter.states = to_exact(self.drafter.states)

    def _run(
        self, calls: Mapping[str, Sequence[BoundCall]], plan: Plan, values: Values, variant: str
    ) -> None:
        super()._run(calls, plan, values, variant)
        values[LOGITS] = numbers(values[LOGITS]).float()

    def _run_alike(self, values: Mapping[str, Tensor], keys: Sequence[str]) -> dict[str, Tensor]:
        made = super()._run_alike(values, keys)
        return made | {LOGITS: numbers(made[LOGITS]).float()}

    def _drafts_and_model(
        self, rows: DraftedRows, variant: str, *, flat: bool
    ) -> tuple[Tensor, Values]:
        drafts, values = super()._drafts_and_model(rows, variant, flat=flat)
        ends, most = rows.start.tolist(), rows.max_new.tolist()
        for end, count, tokens in zip(ends, most, drafts.tolist(), strict=True):
            self.checked.append(CheckedDrafts(end, tuple(tokens[: count - 1])))
        return drafts, values
