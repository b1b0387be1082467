"""The runtime's runner over a finished program in exact arithmetic, on the CPU.

What the runtime may change of a request is nothing then: not even rounding, which in a quantised
recipe moves whole experts. It runs the graphs of any target by their references.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from dsa_compile.artifact.manifest import Manifest
from dsa_compile.artifact.records import KernelRecord
from dsa_compile.ir.execution import BoundCall, Function
from dsa_compile.ir.plan import Plan
from dsa_compile.ir.program import Program
from dsa_compile.ir.region import Region
from dsa_compile.runtime.execution.batch import Batch
from dsa_compile.runtime.execution.bound_calls import bound_calls
from dsa_compile.runtime.execution.draft_rows import DraftedRows
from dsa_compile.runtime.execution.model_runner import ModelRunner
from dsa_compile.runtime.execution.model_steps import LOGITS, Values
from dsa_compile.runtime.execution.plain_inputs import padded_batch
from dsa_compile.runtime.failures.step_errors import StepError
from dsa_compile.runtime.pages.kinds import Caches, make_caches
from dsa_compile.verify.execution.exact import ExactArithmetic, exact_cache, numbers, to_exact
from dsa_compile.verify.inputs.exact_weights import ExactWeightStore
from dsa_compile.weights.sharing import homes_of, weight_homes

_PADDED = 2
"""Rows of padding of a decode step: it has one where the step's own rows end, and one behind."""

_BY_REFERENCE = (KernelRecord("reference", None),)


@dataclass(frozen=True)
class CheckedDrafts:
    """Drafts that a step checked of one request.

    Attributes:
        end: the position of the request's last token, behind which they stand.
        tokens: the drafts.
    """

    end: int
    tokens: tuple[int, ...]


class ExactRunner(ModelRunner):
    """A runner whose numbers are exact; rows of caches that nobody wrote are NaN.

    Calls run on exact tensors, logits are fp32. Prompts of a step run the prompt variant however
    few their tokens are.

    Args:
        manifest: of the artifact.
        program: finished.
        store: gives the weights.
        num_blocks: blocks of each cache.
        max_num_seqs: most requests of a step.
        deterministic: pad decode steps as a deterministic engine does.
        num_drafts: of a request in a step, at most.
        planned: whether the artifact's draft plans make them; else the host looks them up.

    Attributes:
        checked: the drafts, perhaps none, of each request in every step so far that checks some.
    """

    least_prompt_tokens = 1

    def __init__(
        self,
        manifest: Manifest,
        program: Program,
        store: ExactWeightStore,
        num_blocks: int,
        max_num_seqs: int,
        deterministic: bool = False,
        *,
        num_drafts: int = 0,
        planned: bool = False,
    ) -> None:
        by_reference = replace(manifest, target="cpu", kernels=_references(program.regions))
        super().__init__(
            by_reference, program.regions, _weights(manifest, program, store), num_blocks,
            max_num_seqs, deterministic, caches=exact_caches(manifest, num_blocks),
            num_drafts=num_drafts, plans=manifest.plans if planned else None,
        )  # fmt: skip
        self.checked: list[CheckedDrafts] = []
        if self.drafter is not None:
            self.drafter.states = to_exact(self.drafter.states)

    def _bound(self, regions: Mapping[str, Region], plan: Plan) -> dict[str, list[BoundCall]]:
        given = (self._weights, self.caches, self._wait, self.expert_counts)
        bound = bound_calls(self._manifest, regions, plan, *given, around=_exactly)
        return {
            variant: [call.within(_ungraded) for call in calls] for variant, calls in bound.items()
        }

    def _head(self, values: Values, variant: str, rows: Tensor) -> Tensor:
        return numbers(super()._head(values, variant, rows)).float()

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

    @torch.no_grad()
    def forward(self, batch: Batch) -> Tensor:
        """Run one step; fp32 logits ``[N, V]``."""
        return numbers(self._forward(batch)).float()

    def execute(self, batch: Batch) -> Tensor:
        """Run one step, as :meth:`forward` does."""
        return self.forward(batch)


class PaddedRunner(ExactRunner):
    """A runner whose decode steps have rows of padding behind their own, and block tables that are
    too wide, as CUDA graphs have; nothing is captured."""

    def _forward(self, batch: Batch) -> Tensor:
        rows, columns = batch.block_tables.shape
        if not len(batch.logit_rows) == batch.num_tokens == rows:
            return super()._forward(batch)
        return super()._forward(padded_batch(batch, rows + _PADDED, columns + 1))[:rows]


class FailingRunner(ExactRunner):
    """A runner whose steps fail, before anything is written, where a context has some length.

    Attributes:
        refused: tokens of the context; None for no failure.
    """

    refused: int | None = None

    def forward(self, batch: Batch) -> Tensor:
        """Run one step; raises :class:`StepError` if it is refused."""
        if self.refused in batch.context_lens.tolist():
            raise StepError(f"a context of {self.refused} tokens is refused")
        return super().forward(batch)


def _exactly(node: fx.Node, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function of a node in exact arithmetic; that of ``getitem`` takes a tuple, as it is."""
    if function is operator.getitem:
        return function
    mode = ExactArithmetic()

    def call(*args: Any, **kwargs: Any) -> Any:
        return mode.run(function, *args, **kwargs)

    return call


def _ungraded(function: Function) -> Function:
    def run(*args: Any) -> Any:
        with torch.inference_mode(False), torch.no_grad():
            return function(*args)

    return run


def _references(regions: Mapping[str, Region]) -> dict[str, tuple[KernelRecord, ...]]:
    return {
        str(node.target): _BY_REFERENCE
        for region in regions.values()
        for node in region.graph.nodes
        if str(node.target).startswith("dsa.")
    }


def _weights(
    manifest: Manifest, program: Program, store: ExactWeightStore
) -> dict[str, dict[str, Tensor]]:
    planned, homes = store.planned(program.weights), weight_homes(manifest.calls, program.weights)
    made = {
        call.name: planned.of(call, list(homes_of(homes, call.name))) for call in manifest.calls
    }
    return {
        name: {key: made[home.call][home.key] for key, home in own.items()}
        for name, own in homes.items()
    }


def exact_caches(manifest: Manifest, num_blocks: int) -> Caches:
    """Caches as the runtime makes them, exact: what it has in one place is in one place here."""
    wanted = make_caches(manifest, num_blocks, torch.device("cpu"))
    made: dict[int, Tensor] = {}
    for caches in wanted.values():
        for cache in caches.values():
            if cache.data_ptr() not in made:
                made[cache.data_ptr()] = exact_cache(cache.shape, cache.dtype)
    return {
        owner: {key: made[cache.data_ptr()] for key, cache in caches.items()}
        for owner, caches in wanted.items()
    }
