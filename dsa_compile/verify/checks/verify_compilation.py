"""Check every rewrite of a compilation where it was made, in every layer, pass by pass.

How a pass is checked stands in :mod:`~dsa_compile.verify.checks.pass_check`.
"""

import time
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

from dsa_compile.ir.passes import Numerics
from dsa_compile.verify.checks.hazard_check import illegal
from dsa_compile.verify.checks.pass_check import PassChecker
from dsa_compile.verify.checks.plan_check import PLAN, plan_problems
from dsa_compile.verify.checks.rank_fault import RankFault, rank_fault
from dsa_compile.verify.checks.report import (
    HazardReport,
    PassReport,
    SiteReport,
    VerifyReport,
)
from dsa_compile.verify.execution.forked import Forked
from dsa_compile.verify.execution.replay import Replay
from dsa_compile.verify.inputs.parameters import WeightStore
from dsa_compile.verify.inputs.prompt import Prompt

__all__ = ["illegal", "verify"]

Progress = Callable[[PassReport], None]

_EXACT_COST = 4
"""Time that a pass takes if it is run in exact arithmetic too, with one that is not for a unit."""


def verify(
    replay: Replay,
    store: WeightStore,
    prompt: Prompt,
    only: Collection[str] | None = None,
    progress: Progress = lambda report: None,
    processes: int = 1,
    whole: Replay | None = None,
) -> VerifyReport:
    """Check the rewrites of a compilation.

    Args:
        replay: the compilation.
        store: gives the weights.
        prompt: what to run.
        only: names of the passes to check; None for all.
        progress: called with each pass's report.
        processes: among which the passes are divided. Each makes the weights that it runs, and
            its first pass is not given the inputs of the one before it, so that rounding errors
            depend a little on their number.
        whole: of the model that ``replay`` is a sample of: plans and hazards are its own.
    """
    started = time.perf_counter()
    spec = replay.final.spec
    report = VerifyReport(len(prompt), prompt.contexts, spec.index_topk)
    fault = rank_fault(replay)
    first, *others = _divided(replay, only, processes)
    with ExitStack() as stack:
        apart = [
            stack.enter_context(Forked(partial(_check, replay, store, prompt, fault, part)))
            for part in others
        ]
        done = _check(replay, store, prompt, fault, first, progress)
        report.passes, report.sites = done.passes, done.sites
        for forked in apart:
            if done.ended:
                break
            done = forked.result()
            report.passes += done.passes
            report.sites += done.sites
            for shown in done.passes:
                progress(shown)
    if fault is not None:  # what follows it is wrong by it
        report.hazards.append(HazardReport(fault.run.step.name, fault.number, (), fault.problem))
    if fault is None:
        finished = whole or replay
        report.hazards += illegal(finished)
        report.hazards += (
            HazardReport(PLAN, None, (), text) for text in plan_problems(finished.final)
        )
    refused = fault is None and (report.ok or not replay.complete)  # else it follows from those
    if replay.failure is not None and refused:
        name, reason = replay.failure
        problem = f"cannot be run on what is before it: {reason}"
        report.passes.append(PassReport(name, "", 0, problem=problem))
    report.rank()
    report.seconds = time.perf_counter() - started
    return report


@dataclass
class _Checked:
    """Reports of some passes.

    Attributes:
        passes: in order.
        sites: their rewrites.
        ended: whether no pass behind these can be checked.
    """

    passes: list[PassReport] = field(default_factory=list)
    sites: list[SiteReport] = field(default_factory=list)
    ended: bool = False


def _check(
    replay: Replay,
    store: WeightStore,
    prompt: Prompt,
    fault: RankFault | None,
    indices: Sequence[int],
    progress: Progress = lambda report: None,
) -> _Checked:
    """Check the passes of these numbers, which ascend."""
    checker = PassChecker(replay, store, prompt)
    done = _Checked(sites=checker.sites)
    for place, index in enumerate(indices):
        run = replay.runs[index]
        if place and any(left.sites for left in replay.runs[indices[place - 1] + 1 : index]):
            checker.skip()
        number = fault.number if fault is not None and fault.run is run else None
        done.passes.append(checker.check(index, run, number))
        progress(done.passes[-1])
        if checker.broken or number is not None:
            done.ended = True  # nothing can be captured behind a pass whose program does not run
            break
    return done


def _divided(replay: Replay, only: Collection[str] | None, count: int) -> list[list[int]]:
    """Numbers of the passes to check, in at most ``count`` parts that take about as long."""
    costs = {
        index: 1 if run.step.numerics is Numerics.BITWISE else _EXACT_COST
        for index, run in enumerate(replay.runs)
        if run.sites and (only is None or run.step.name in only)
    }
    parts: list[list[int]] = [[] for _ in range(count)]
    whole, before = sum(costs.values()), 0
    for index, cost in costs.items():
        parts[(2 * before + cost) * count // (2 * whole)].append(index)
        before += cost
    return [part for part in parts if part] or [[]]
