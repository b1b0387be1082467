"""Steps on several ranks: what the first rank sends, and what all of them do with it.

Lanes run a step of one shape (:mod:`dsa_compile.runtime.execution.step_shape`), as they meet in the
model, in first drafts, and at every depth of deeper ones: a lane without requests, or without
drafts, meets the others with idle rows. How many drafts of a request are right is the matter of its
lane alone.

Where the host chooses the tokens of a request, it chooses those of all: every lane sends its logits
to the first rank, and gets its tokens before the first drafts of the next step are made.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch

from dsa_compile.facts.layout import DP, Layout
from dsa_compile.runtime.execution.model_runner import ModelRunner, OpenStep
from dsa_compile.runtime.execution.runner import LaunchedTokens, StepInputs
from dsa_compile.runtime.execution.step_shape import StepShape
from dsa_compile.runtime.ranks.lane_results import LaneAnswers, LaneResults
from dsa_compile.runtime.ranks.lanes import lane_steps
from dsa_compile.runtime.ranks.messages import ChosenTokens, LaneLogits, StepPlan
from dsa_compile.runtime.ranks.processes import RankProcess
from dsa_compile.runtime.sampling.draw_options import DrawOptions
from dsa_compile.runtime.sampling.host_choice import (
    CheckedRows,
    Chosen,
    HostChoice,
    KnownTokens,
)


class GroupSteps:
    """Steps of the first rank, which schedules for all lanes.

    Args:
        runner: of this rank.
        layout: of all ranks.
        others: their processes.
        results: of the other lanes.
        max_running: most requests of a lane.
    """

    def __init__(
        self,
        runner: ModelRunner,
        layout: Layout,
        others: Sequence[RankProcess],
        results: LaneResults,
        max_running: int,
    ) -> None:
        self._runner, self._layout, self._max_running = runner, layout, max_running
        self._others, self._results = tuple(others), results
        self._options = [DrawOptions(max_running) for _ in range(layout.dp)]

    def plans(self, inputs: StepInputs, number: int) -> list[StepPlan]:
        """Step of each lane, as its ranks are sent it.

        Args:
            inputs: of all lanes.
            number: of the step.
        """
        steps = [inputs]
        if self._layout.dp > 1:
            steps = lane_steps(inputs, self._layout.dp, self._max_running)
        shape = StepShape.of(steps) if len(steps) > 1 else None
        later = not self._runner.chooses_tokens(inputs)
        return [
            StepPlan(
                replace(step, states=()),
                options.records(step.rows, step.states, step.counts),
                later,
                shape,
                number,
            )
            for step, options in zip(steps, self._options, strict=True)
        ]

    def launch(self, inputs: StepInputs, plans: Sequence[StepPlan]) -> LaunchedTokens:
        """Launch a step on this rank, of whose plans the others have theirs.

        Args:
            inputs: of all lanes.
            plans: of each.
        """
        own = plans[0]
        if not own.chosen_later:
            tokens = self._runner.launch_whole(own.inputs, own.options, own.shape)
            return self._results.joined(own.number, tokens)
        step = self._runner.open_step(own.inputs, own.options, own.shape)
        lanes = self._results.logits(_logits_of(self._runner, step, own.number))
        checked = CheckedRows(torch.from_numpy(lanes.logits), lanes.drafts)
        choice = self._runner.choose(inputs, checked)
        if self._runner.drafter is not None:
            chosen = _by_lane(choice, plans)
            for other in self._others:
                lane = self._layout.numbers(other.rank)[DP]
                other.connection.send(ChosenTokens(*chosen[lane]))
            self._runner.close_step(step, chosen[0])
        return KnownTokens(choice.tokens(lanes.prompt))


def follow_step(
    runner: ModelRunner,
    plan: StepPlan,
    answers: LaneAnswers | None,
    receive: Callable[[], object],
) -> None:
    """Run a step on a rank but the first.

    Args:
        runner: of this rank.
        plan: of its lane.
        answers: to the first rank of all, from the first one of another lane; else None.
        receive: waits for the next message of the first rank.
    """
    if not plan.chosen_later:
        tokens = runner.launch_whole(plan.inputs, plan.options, plan.shape)
        if answers is not None:
            answers.tokens(plan.number, tokens)
        return
    step = runner.open_step(plan.inputs, plan.options, plan.shape)
    if answers is None:
        runner.score(step)  # its lane's ranks meet there
    else:
        answers.logits(_logits_of(runner, step, plan.number))
    if runner.drafter is not None:
        message = receive()
        assert isinstance(message, ChosenTokens)
        runner.close_step(step, (message.sampled, message.kept))


def _logits_of(runner: ModelRunner, step: OpenStep, number: int) -> LaneLogits:
    checked = step.checked()
    return LaneLogits(number, checked.logits.numpy(), runner.score(step), checked.drafts)


def _by_lane(choice: HostChoice, plans: Sequence[StepPlan]) -> list[Chosen]:
    """Tokens chosen for each lane, as wide as its own step."""
    ends = np.cumsum([0, *(len(plan.inputs.rows) for plan in plans)])
    return [
        (
            choice.sampled[start:end, : max(plan.inputs.max_new, default=1)],
            choice.kept[start:end],
        )
        for (start, end), plan in zip(pairwise(ends), plans, strict=True)
    ]
