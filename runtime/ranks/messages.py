"""Messages between the first rank and the others, pickled over a pair of sockets.

Both ends are the same program, started one by the other: no port is open and nobody else can send.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dsa_compile.facts.layout import Layout
from dsa_compile.runtime.engine_options import EngineOptions
from dsa_compile.runtime.execution.batch import Batch
from dsa_compile.runtime.execution.prompt_rows import PromptRows
from dsa_compile.runtime.execution.runner import StepInputs, StepTokens
from dsa_compile.runtime.execution.step_shape import StepShape
from dsa_compile.runtime.requests.logprobs import TokenLogprobs
from dsa_compile.runtime.sampling.sampler import SamplingState


@dataclass(frozen=True)
class Start:
    """Message to a rank that has just begun.

    Args:
        rank: its number, from 1.
        layout: of all ranks.
        port: where the first rank keeps the addresses of all, on this machine.
        path: of the artifact.
        target: that the artifact was compiled for.
        options: of loading; name the artifact's digest, so that all ranks run the same one.
        num_threads: of torch, the same on all ranks: sums may depend on it.
    """

    rank: int
    layout: Layout
    port: int
    path: str
    target: str
    options: EngineOptions
    num_threads: int


@dataclass(frozen=True)
class Failed:
    """Message from a rank that ends because of an error."""

    reason: str


@dataclass(frozen=True)
class StepPlan:
    """A step for every rank to run, and to choose its tokens where the next may need them.

    Args:
        batch: what is computed.
        ahead: whether the tokens are chosen on each rank; if not, the first rank chooses them, and
            they come with the batch of the next step.
        rows: as in :class:`StepInputs`; empty unless ``ahead``, as are the others.
        states: those that are not yet known on the other ranks, by place in ``rows``.
        counts: as in :class:`StepInputs`.
        max_new: likewise.
        prompt: likewise; of a step that is not ``ahead``.
        number: of the step.
    """

    batch: Batch
    ahead: bool
    rows: Sequence[int] = ()
    states: Sequence[tuple[int, SamplingState]] = ()
    counts: Sequence[int] = ()
    max_new: Sequence[int] = ()
    prompt: PromptRows | None = None
    number: int = 0


@dataclass(frozen=True)
class DraftedPlan:
    """A step for every rank of a lane to run, of engines that draft.

    Args:
        inputs: the lane's, without states.
        options: how its tokens are drawn, ``[Y]`` records of
            :class:`~dsa_compile.runtime.sampling.draw_options.DrawOptions`.
        chosen_later: whether the first rank of all chooses the tokens, and sends a
            :class:`ChosenTokens` behind this.
        shape: that the step has on all lanes; None where there is one.
        number: of the step.
    """

    inputs: StepInputs
    options: NDArray[np.void]
    chosen_later: bool
    shape: StepShape | None = None
    number: int = 0


@dataclass(frozen=True)
class ChosenTokens:
    """Tokens that the first rank chose for a lane, of a step that ranks draft behind.

    Args:
        sampled: int64 ``[Y, W]``.
        kept: int64 ``[Y]``, how many of them count.
    """

    sampled: NDArray[np.int64]
    kept: NDArray[np.int64]


@dataclass(frozen=True)
class LaneTokens:
    """Message from the first rank of a lane but the first one: the tokens of a step that it chose.

    Args:
        number: of the step.
        tokens: of the lane's requests.
    """

    number: int
    tokens: StepTokens


@dataclass(frozen=True)
class LaneLogits:
    """Message like :class:`LaneTokens` for a step whose tokens the first rank of all chooses.

    Args:
        number: of the step.
        logits: fp32 ``[N, V]``, those that the lane's batch wants.
        prompt: log-probabilities of prompt tokens, an entry a row of the lane's ``prompt``.
        drafts: those that the step checked of each request; empty where nothing is drafted.
    """

    number: int
    logits: NDArray[np.float32]
    prompt: Sequence[TokenLogprobs] = ()
    drafts: Sequence[Sequence[int]] = ()


class PlanWriter:
    """Makes plans of a lane's steps; sends how a request samples once, when it comes to its row."""

    def __init__(self) -> None:
        self._sent: dict[int, SamplingState] = {}

    def plan(self, inputs: StepInputs, number: int = 0) -> StepPlan:
        """The plan of the lane's step with a number."""
        if not inputs.ahead:
            return StepPlan(inputs.batch, False, prompt=inputs.prompt, number=number)
        new = []
        for place, (row, state) in enumerate(zip(inputs.rows, inputs.states, strict=True)):
            if self._sent.get(row) is not state:
                self._sent[row] = state
                new.append((place, state))
        sampled = (inputs.rows, new, inputs.counts, inputs.max_new)
        return StepPlan(inputs.batch, True, *sampled, number=number)


class PlanReader:
    """Makes steps of plans."""

    def __init__(self) -> None:
        self._known: dict[int, SamplingState] = {}

    def inputs(self, plan: StepPlan) -> StepInputs:
        """The step of a plan."""
        for place, state in plan.states:
            self._known[plan.rows[place]] = state
        states = [self._known[row] for row in plan.rows]
        return StepInputs(plan.batch, plan.rows, states, plan.counts, plan.max_new, plan.ahead)
