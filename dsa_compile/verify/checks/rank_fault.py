"""The rewrite after which a program of several ranks is none, found without running it."""

from dataclasses import dataclass

from dsa_compile.ir.placement_check import placement_problems
from dsa_compile.ir.program import Program
from dsa_compile.verify.execution.replay import PassRun, Replay


@dataclass(frozen=True)
class RankFault:
    """Fault that keeps ranks from running together, and where it began.

    Attributes:
        run: the pass.
        number: of its rewrite, from 1.
        problem: a sentence that names the graph and the node.
    """

    run: PassRun
    number: int
    problem: str


def rank_fault(replay: Replay) -> RankFault | None:
    """The first rewrite that leaves a value to be taken for what it is not on each rank."""
    if not replay.runs or replay.final.config.layout.world == 1:
        return None
    for index, run in enumerate(replay.runs):
        problem = _problem(replay.after(index))
        if problem and run.sites:
            stops = replay.between(run)
            number = next(n for n, program in enumerate(stops, start=1) if _problem(program))
            return RankFault(run, number, problem)
    return None


def _problem(program: Program) -> str:
    return next(placement_problems(program), "")
