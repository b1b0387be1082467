"""Checks for a bisection: whether a program stopped after any rewrite is good or bad."""

import math
from collections.abc import Sequence
from typing import Protocol

import torch

from dsa_compile.ir.program import Program
from dsa_compile.verify.bisect.search import Trial
from dsa_compile.verify.checks.rewrite_run import in_a_line
from dsa_compile.verify.comparison.agreement import worst
from dsa_compile.verify.comparison.stage_calls import compare_calls, run_against
from dsa_compile.verify.comparison.tolerances import EXACT
from dsa_compile.verify.execution.memory import refuse_without_memory
from dsa_compile.verify.execution.replay import Replay, Rewrite
from dsa_compile.verify.execution.stages import Stage, run_stage
from dsa_compile.verify.execution.traces import Trace
from dsa_compile.verify.inputs.exact_weights import ExactWeightStore
from dsa_compile.verify.inputs.parameters import WeightStore
from dsa_compile.verify.inputs.prompt import Prompt


class Check(Protocol):
    """A property that holds of a right program.

    Attributes:
        key: names the check and its options, so that two searches are not mixed up.
        count: rewrites that may be left out.
        subject: what it runs with all of them.
    """

    key: str
    count: int
    subject: str

    def trial(self, position: int) -> Trial:
        """Try the program with the first ``position`` of these rewrites."""
        ...

    def rewrite(self, position: int) -> Rewrite:
        """The rewrite of a number, from 1 to ``count``."""
        ...


class StageCheck:
    """A check that runs a stage on the CPU, so that every rewrite may be left out."""

    subject = "the finished graphs, run by the CPU's references"

    def __init__(self, key: str, replay: Replay, store: WeightStore, prompt: Prompt) -> None:
        self.key = key
        self.count = replay.count
        self.rewrite = replay.rewrite
        self._replay = replay
        self._store = store
        self._prompt = prompt

    def trial(self, position: int) -> Trial:
        """See :class:`Check`; a program that does not run is bad, but for want of memory.

        Raises:
            UserError: no memory was left for it.
        """
        try:
            bad, detail = self._judge(Stage.of(self._replay.at(position), self._store))
        except Exception as error:  # whatever an op raises on what no op should be given
            refuse_without_memory(error, f"the program with {position} rewrites")
            bad, detail = True, f"does not run: {in_a_line(error)}"
        return Trial(position, bad, detail)

    def _judge(self, stage: Stage) -> tuple[bool, str]:
        raise NotImplementedError


class ReferenceCheck(StageCheck):
    """Each layer, given the exported program's input, returns what it returns there.

    Both run in exact arithmetic, so that no recipe's rounding hides a wrong rewrite or looks like
    one.

    Args:
        replay: the compilation.
        store: gives the weights.
        prompt: what to run.
        exported: the program before any pass.
        limit: relative error of a row above which a program is bad; None for
            :data:`~dsa_compile.verify.comparison.tolerances.EXACT`.
    """

    def __init__(
        self,
        replay: Replay,
        store: WeightStore,
        prompt: Prompt,
        exported: Program,
        limit: float | None = None,
    ) -> None:
        exact = ExactWeightStore(store.source)
        self._limit = EXACT if limit is None else limit
        super().__init__(f"reference within {self._limit}", replay, exact, prompt)
        self._exported = exported
        self._known: Trace | None = None

    @property
    def reference(self) -> Trace:
        """The exported program in exact arithmetic, watched."""
        if self._known is None:
            stage = Stage.of(self._exported, self._store)
            self._known = run_stage(stage, self._prompt, watch=True)
        return self._known

    def _judge(self, stage: Stage) -> tuple[bool, str]:
        made = run_against(stage, self._prompt, self.reference)
        total = worst(compare_calls(self.reference, made))
        bad = total.error > self._limit
        if total.error == math.inf:
            return bad, "a layer's result is not finite or not of the same kind"
        return bad, f"error {total.error:.1e} of a layer, limit {self._limit:.1e}"


class TokensCheck(StageCheck):
    """A prompt is followed by given tokens, the likeliest at every step.

    Args:
        replay: the compilation.
        store: gives the weights.
        prompt: token ids.
        expected: token ids that should follow.
        block_size: rows of a cache page.
    """

    def __init__(
        self,
        replay: Replay,
        store: WeightStore,
        prompt: Sequence[int],
        expected: Sequence[int],
        block_size: int,
    ) -> None:
        given = Prompt.decoding([prompt], [expected[:-1]], block_size)
        super().__init__(f"tokens {list(prompt)} then {list(expected)}", replay, store, given)
        self._expected = list(expected)

    def _judge(self, stage: Stage) -> tuple[bool, str]:
        logits = run_stage(stage, self._prompt).logits()
        found = logits[-len(self._expected) :].float().argmax(-1).tolist()
        for place, (token, wanted) in enumerate(zip(found, self._expected, strict=True), start=1):
            if token != wanted:
                return True, f"token {place} is {token}, not {wanted}"
        return bool(torch.isnan(logits).any()), "the expected tokens"
