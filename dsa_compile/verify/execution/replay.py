"""Replay a compilation, and stop it after any of its rewrites."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from dsa_compile.ir.edit import Editor
from dsa_compile.ir.passes import Pass, PassRecord, sweep
from dsa_compile.ir.program import Level, Program
from dsa_compile.ir.region import Region, Role
from dsa_compile.ir.site import Site
from dsa_compile.ir.spec import verify
from dsa_compile.passes.added import pipeline_of
from dsa_compile.passes.manager import rank_refusal


@dataclass(frozen=True)
class Rewrite:
    """One rewrite of a compilation: a site of a pass.

    Attributes:
        position: among all rewrites of the compilation, from 1.
        pass_name: whose.
        number: within the pass, from 1.
        region: the graph; empty for a rewrite of several graphs at once.
        path: the module of the reference model.
    """

    position: int
    pass_name: str
    number: int
    region: str
    path: str

    def __str__(self) -> str:
        where = " ".join(part for part in (self.region, self.path) if part) or "all graphs"
        return f"{self.pass_name} site {self.number} ({where})"


@dataclass(frozen=True)
class PassRun:
    """One pass as it ran.

    Attributes:
        step: the pass.
        before: the program that it was given.
        record: what it did.
        first: how many rewrites were made before it.
        between: the program between any two of its rewrites, one fewer than these; graphs that a
            rewrite leaves alone are shared with the program before it.
    """

    step: Pass
    before: Program
    record: PassRecord
    first: int
    between: tuple[Program, ...]

    @property
    def sites(self) -> Sequence[Site]:
        """Rewrites of the pass."""
        return self.record.journal.sites


class Replay:
    """The passes of a configuration over an exported program, kept so as to stop anywhere.

    Args:
        exported: at the EXPORTED level; left as it is.
        pipeline: the passes, and the levels between them; those of the configuration if None.

    Attributes:
        runs: one for each pass that the configuration leaves on, in order.
        final: the program that they make.
        count: rewrites of all of them.
        failure: the pass that could not be run and why, or None. A wrong rewrite may leave what a
            later pass cannot take; ``final`` is then the program before that pass. The pass behind
            the one at which the configuration stops is tried, too: it may be why it stops there.
        complete: whether all passes of the configuration ran.
    """

    def __init__(self, exported: Program, pipeline: Sequence[Pass | Level] | None = None) -> None:
        self.runs: list[PassRun] = []
        program = self._fork(exported)
        first = 0
        self.failure: tuple[str, str] | None = None
        self.complete = True
        steps = iter(pipeline_of(exported.config) if pipeline is None else pipeline)
        for step in steps:
            if isinstance(step, Level):
                program.level = step
            elif step.runs(exported.config):
                before = self._fork(program)
                between: list[Program] = []
                try:
                    record = _run(step, program, between)
                except Exception as error:  # a broken promise, or whatever a wrong graph leads to
                    self.failure, program = (step.name, str(error)), before
                    self.complete = False
                    break
                self.runs.append(PassRun(step, before, record, first, tuple(between)))
                first += len(record.journal.sites)
                if step.name == exported.config.stop_after:
                    self.failure = _refused(steps, self._fork(program))
                    break
        self.final = program
        self.count = first

    def rewrite(self, position: int) -> Rewrite:
        """The rewrite of a number, from 1 to ``count``."""
        run = self._run_of(position)
        site = run.sites[position - run.first - 1]
        return Rewrite(position, run.step.name, site.number, site.region, site.path)

    def at(self, position: int) -> Program:
        """The program with the first ``position`` rewrites made; not to be changed."""
        if position == 0:
            return self.runs[0].before
        run = self._run_of(position)
        return self.between(run)[position - run.first - 1]

    def within(self, run: PassRun, limit: int) -> Program:
        """A new program in which a pass has made its first ``limit`` rewrites."""
        program = self._fork(run.before)
        run.step(program, limit)
        return program

    def between(self, run: PassRun) -> tuple[Program, ...]:
        """Programs of :meth:`within` for 1, 2, … rewrites, up to all; not to be changed."""
        index = next(index for index, other in enumerate(self.runs) if other is run)
        return (*run.between, self.after(index))

    def after(self, index: int) -> Program:
        """The program that pass ``index`` left; not to be changed."""
        return self.runs[index + 1].before if index + 1 < len(self.runs) else self.final

    def _run_of(self, position: int) -> PassRun:
        ends = [run.first + len(run.sites) for run in self.runs]
        return self.runs[bisect_left(ends, position)]

    @staticmethod
    def _fork(program: Program) -> Program:
        return program.fork(replace(program.config, records=False))


def _refused(steps: Iterable[Pass | Level], program: Program) -> tuple[str, str] | None:
    """The next pass to run, if it cannot be run on a program or a compilation refuses what it
    leaves, and why; the program is changed."""
    name = ""
    try:
        for step in steps:
            if isinstance(step, Level):
                if name:
                    verify(program, step)
                program.level = step
            elif step.runs(program.config):
                if name:
                    break
                name = step.name
                step(program)
                if problem := rank_refusal(program):
                    return name, problem.lstrip(": ")
    except Exception as error:  # a broken promise, or whatever a wrong pass leads to
        return name, str(error)
    return None


def _run(step: Pass, program: Program, between: list[Program]) -> PassRecord:
    """Run a pass, and add to ``between`` the program between any two of its rewrites."""

    def stop(site: Site) -> None:
        last = between[-1] if between else None
        between.append(_snapshot(program, last, site.region, step.name))

    return step(program, None, stop)


def _snapshot(program: Program, last: Program | None, changed: str, pass_name: str) -> Program:
    """A program as it stands between two rewrites, swept.

    Args:
        program: left as it is.
        last: its snapshot before the rewrite, whose other graphs are taken; None if there is none.
        changed: name of the graph that the rewrite changed; empty for several.
        pass_name: whose rewrite.
    """
    if last is not None and changed and program.regions.keys() == last.regions.keys():
        one = replace(program, regions={changed: program.regions[changed]}).fork(program.config)
        Editor(one.regions[changed], one.world, pass_name).sweep()
        if _values(one.regions[changed]) == _values(last.regions[changed]):
            return replace(one, regions={**last.regions, **one.regions})
    whole = program.fork(program.config)
    sweep(whole, pass_name)
    return whole


def _values(region: Region) -> tuple[set[str], tuple[str, ...]]:
    """Names of the values that a graph takes from others and gives to others."""
    return {node.meta["key"] for node in region.inputs_of(Role.VALUE)}, region.outputs
