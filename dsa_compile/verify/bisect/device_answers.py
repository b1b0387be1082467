"""Answers of engines as they are loaded, on whatever device, with the drafts that they check."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dsa_compile.runtime.engine import Engine
from dsa_compile.runtime.execution.drafting_runner import DraftingRunner
from dsa_compile.runtime.requests.sampling_params import SamplingParams
from dsa_compile.verify.bisect.answer import Answer
from dsa_compile.verify.bisect.draft_check import drafts_problem
from dsa_compile.verify.bisect.draft_reference import DraftReference
from dsa_compile.verify.bisect.runtime_answers import FLOOR, MARGIN, Answers
from dsa_compile.verify.bisect.runtime_scenes import Round, Tokens
from dsa_compile.verify.execution.exact_drafting_runner import CheckedDrafts
from dsa_compile.verify.execution.recorded_drafts import RecordedDrafts


@dataclass(eq=False)
class DeviceAnswers(Answers):
    """Engines loaded from the artifact: drafts are wrong where no rounding explains them.

    Attributes:
        exact: False.
    """

    exact: bool = False
    _recorded: RecordedDrafts | None = None
    _played: list[Answer] = field(default_factory=list)
    _right: dict[Any, dict[int, Tokens]] = field(default_factory=dict)

    def load(
        self, options: dict[str, Any], longest: int, made: Callable[..., Any] | None = None
    ) -> Engine:
        """An engine, whose drafts are recorded; see :meth:`Answers.load`."""
        engine = super().load(options, longest, made)
        runner = engine._runner
        if isinstance(runner, DraftingRunner) and runner.drafter is not None:
            self._recorded = RecordedDrafts(runner)
        return engine

    def _close(self, engine: Engine) -> None:
        self._recorded = None  # it holds the engine's runner, which is to be freed
        super()._close(engine)

    def _drafts_problem(
        self, engine: Engine, prompts: Sequence[Tokens], answers: Sequence[Answer]
    ) -> str:
        """Problem of an engine's drafts: unlike the draft plans' or kept wrongly; empty if none."""
        runner = engine._runner
        if not isinstance(runner, DraftingRunner) or runner.drafter is None:
            return ""
        assert self._recorded is not None, "see load"
        checked = self._recorded.checked
        for prompt, found in zip(prompts, self._played, strict=True):
            ids = (*prompt, *found.tokens)  # its own, which a near tie may part from the plain ones
            mine = [one for one in checked if len(prompt) <= one.end < len(ids) - 1]
            chains = self._right_drafts(ids, len(prompt), mine) if mine else {}
            problem = drafts_problem(ids, len(prompt), chains, mine)
            if problem:
                return f"{problem}, prompt of {len(prompt)} tokens"
        return ""

    def _play(self, engine: Engine, turn: Round, params: SamplingParams) -> list[Answer]:
        self._played = super()._play(engine, turn, params)
        return self._played

    def _right_drafts(
        self, ids: Tokens, first: int, checked: Sequence[CheckedDrafts]
    ) -> dict[int, Tokens]:
        """The drafts that were made where rounding explains them, the likeliest ones elsewhere.

        Both references take the drafts that were made, each for the next: so what rounding does is
        measured along them, and a draft may be any that is as likely as the best by so much.
        """
        made = {one.end: one.tokens for one in checked}
        depth = max(map(len, made.values()))
        key = ids, first, tuple(sorted(made.items()))
        if key not in self._right:
            exact, rounded = (
                DraftReference(self._program, store, self._manifest.block_size).logits(
                    ids, first, depth, made
                )
                for store in (self._store, self.recompiled.store)
            )
            self._right[key] = likely_drafts(exact, rounded, made)
        return self._right[key]


def likely_drafts(
    exact: Mapping[int, Tensor], rounded: Mapping[int, Tensor], made: Mapping[int, Tokens]
) -> dict[int, Tokens]:
    """Drafts as they were made, but for those that no rounding makes: the likeliest stand there.

    Behind the drafts that were made, and from positions where there are none, each side goes on
    with the likeliest tokens of its own: how far those are apart says nothing of rounding.

    Args:
        exact: logits ``[depth, V]`` by the position of the last token, along the drafts made.
        rounded: the same as the recipe rounds.
        made: the drafts.
    """

    def off_at(end: int, count: int) -> float:
        sides = (logits[end][:count].log_softmax(-1) for logits in (exact, rounded))
        return float(torch.sub(*sides).abs().max())

    off = max((off_at(end, len(drafts)) for end, drafts in made.items() if drafts), default=0.0)
    tie = 2 * (FLOOR + MARGIN * off)
    found = {}
    for end, drafts in made.items():
        best = exact[end].max(-1)
        found[end] = tuple(
            draft if float(best.values[n] - exact[end][n, draft]) <= tie else int(best.indices[n])
            for n, draft in enumerate(drafts)
        )
    return found
