"""Check every rewrite of a compilation where it was made, in every layer.

A rewrite is checked on its own: matched subgraph against replacement, on what the layers of the
program just before its pass saw of a prompt, and on inputs made from that to be hard. So an error
is found where it was made, however many layers and passes blur it later. A pass is checked as a
whole too: each layer, given the same inputs before and after it, must return the same.
"""

import time
from collections.abc import Callable, Iterator

from dsa_compile.debugging.agreement import UNLIKE, Agreement, compare, worst
from dsa_compile.debugging.delta import Delta, find_delta
from dsa_compile.debugging.parameters import Weights, WeightStore
from dsa_compile.debugging.prompt import Prompt
from dsa_compile.debugging.replay import PassRun, Replay
from dsa_compile.debugging.report import HazardReport, PassReport, SiteReport, VerifyReport
from dsa_compile.debugging.sites import CAPTURED, VARIATIONS, SiteRun, run_site
from dsa_compile.debugging.stages import CallTrace, Stage, Trace, run_stage
from dsa_compile.debugging.verdict import (
    pass_problem,
    recipe_tolerance,
    site_problem,
    tolerance_of,
    weighs,
)
from dsa_compile.ir.calls import StepCall
from dsa_compile.ir.passes import Numerics
from dsa_compile.ir.program import Level, Program
from dsa_compile.ir.region import Role
from dsa_compile.ir.site import Site
from dsa_compile.ir.spec import violations

Progress = Callable[[PassReport], None]


def verify(
    replay: Replay, store: WeightStore, prompt: Prompt, progress: Progress = lambda report: None
) -> VerifyReport:
    """Check all rewrites of a compilation.

    Args:
        replay: the compilation.
        store: gives the weights.
        prompt: what to run.
        progress: told of each pass.
    """
    started = time.perf_counter()
    spec = replay.final.spec
    report = VerifyReport(len(prompt), prompt.cuts, spec.index_topk)
    checker = _Checker(replay, store, prompt, report)
    for index, run in enumerate(replay.runs):
        if not run.sites:
            continue
        report.passes.append(checker.check(index, run))
        progress(report.passes[-1])
        if checker.trace is None:
            break  # nothing can be captured behind a pass whose program does not run
    report.hazards += _hazards(replay)
    report.rank()
    report.seconds = time.perf_counter() - started
    return report


def layer_of(call: StepCall) -> int | str:
    """Number of the layer, or ``embed`` or ``head``."""
    _, _, digits = call.stem.partition("_")
    return int(digits) if digits else call.stem


class _Checker:
    def __init__(
        self, replay: Replay, store: WeightStore, prompt: Prompt, report: VerifyReport
    ) -> None:
        self.replay = replay
        self.store = store
        self.prompt = prompt
        self.report = report
        self.trace: Trace | None = self._run(replay.runs[0].before)

    def check(self, index: int, run: PassRun) -> PassReport:
        """Check one pass; the trace moves on to the program behind it, or is None."""
        assert self.trace is not None
        done = PassReport(run.step.name, run.step.numerics.value, len(run.sites))
        before = run.before
        for limit, site in enumerate(run.sites, start=1):
            after = self.replay.within(run, limit)
            if site.region:
                self._site(done, self.trace, run, site, before, after)
            before = after
        try:
            self._whole(done, self.trace, run, self.replay.after(index))
            self.trace = self._run(self.replay.after(index))
        except Exception as error:  # whatever an op raises on inputs that no op should be given
            done.problem = done.problem or f"its program does not run: {_line(error)}"
            self.trace = None
        return done

    def _run(self, program: Program, given: Trace | None = None) -> Trace:
        return run_stage(Stage.of(program, self.store), self.prompt, given=given, watch=True)

    def _site(
        self,
        done: PassReport,
        trace: Trace,
        run: PassRun,
        site: Site,
        before: Program,
        after: Program,
    ) -> None:
        delta = find_delta(before.regions[site.region], after.regions[site.region])
        if delta is None:
            return
        weights = (self.store.planned(before.weights), self.store.planned(after.weights))
        for captured in trace.calls:
            if site.region not in {region.name for region in captured.regions}:
                continue
            found: list[tuple[SiteRun, str]] = []
            for inputs in VARIATIONS if delta.varies else (CAPTURED,):
                found.append(self._tried(run, delta, captured, trace, weights, inputs))
                if inputs == CAPTURED:
                    for step in found[0][0].steps:
                        step.extend(captured)
            done.runs += len(found)
            self._note(done, run, site, captured, delta, found)

    def _tried(
        self,
        run: PassRun,
        delta: Delta,
        captured: CallTrace,
        trace: Trace,
        weights: tuple[Weights, Weights],
        inputs: str,
    ) -> tuple[SiteRun, str]:
        try:
            made = run_site(delta, captured, trace, self.prompt, weights, inputs)
        except Exception as error:  # whatever an op raises on inputs that no op should be given
            unlike = dict.fromkeys(delta.pairs[:1], UNLIKE)
            return SiteRun(inputs, unlike, None, ()), f"does not run: {_line(error)}"
        tolerance = tolerance_of(delta)
        found = (run.step.numerics, inputs, made.worst, made.choice, tolerance)
        return made, site_problem(*found)

    def _note(
        self,
        done: PassReport,
        run: PassRun,
        site: Site,
        captured: CallTrace,
        delta: Delta,
        found: list[tuple[SiteRun, str]],
    ) -> None:
        tolerance, exact = tolerance_of(delta), run.step.numerics is Numerics.BITWISE
        counted = [f for f in found if f[1] or exact or weighs(f[0].inputs)]
        made, problem = max(counted, key=lambda f: (bool(f[1]), f[0].worst.error))
        pair = max(made.agreements, key=lambda p: made.agreements[p].error, default=("", ""))
        done.error = max(done.error, made.worst.error)
        choice = made.choice
        self.report.sites.append(
            SiteReport(
                position=run.first + site.number,
                pass_name=run.step.name,
                number=site.number,
                region=site.region,
                path=site.path,
                layer=layer_of(captured.call),
                inputs=made.inputs,
                bitwise=all(f.worst.bitwise for f, _ in found),
                error=made.worst.error,
                max_abs=made.worst.max_abs,
                overlap=made.worst.overlap if choice is None else choice.overlap,
                margin=None if choice is None else choice.margin,
                deficit=None if choice is None else choice.deficit,
                tolerance=0.0 if exact else tolerance,
                values=pair,
                problem=problem,
            )
        )
        if problem and not done.problem:
            done.problem = f"site {site.number} {problem}"

    def _whole(self, done: PassReport, trace: Trace, run: PassRun, after: Program) -> None:
        results = dict(self._returned(trace, after))
        for layer, found in results.items():
            done.layers[str(layer)] = (found.typical, found.error)
        problem = self._wrong(run, results)
        if problem and not done.problem:
            done.problem = problem
            done.suspect = self._suspect(trace, run)

    def _wrong(self, run: PassRun, results: dict[int | str, Agreement]) -> str:
        tolerance = recipe_tolerance(run.before.config.recipe)
        for layer, found in results.items():
            problem = pass_problem(run.step.numerics, found, tolerance)
            if problem:
                where = f"layer {layer}" if isinstance(layer, int) else layer
                return f"what {where} returns {problem}"
        return ""

    def _suspect(self, trace: Trace, run: PassRun) -> int:
        """The first rewrite with which the pass goes wrong, by halving."""
        good, bad = 0, len(run.sites)
        while bad - good > 1:
            middle = (good + bad) // 2
            results = dict(self._returned(trace, self.replay.within(run, middle)))
            if self._wrong(run, results):
                bad = middle
            else:
                good = middle
        return bad

    def _returned(self, trace: Trace, after: Program) -> Iterator[tuple[int | str, Agreement]]:
        """How what each call returns agrees with what it returned before the pass."""
        new = self._run(after, given=trace)
        for index, (old, made) in enumerate(zip(trace.calls, new.calls, strict=True)):
            keys = _always(old) & _always(made) - {"causal_mask"}
            found = [
                compare(trace.result(index, k), new.result(index, k), len(self.prompt))
                for k in sorted(keys)
            ]
            yield layer_of(old.call), worst(found)


def _line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def _always(call: CallTrace) -> set[str]:
    """What a call returns in every step."""
    return set.intersection(*(set(outputs) for outputs in call.outputs))


def _hazards(replay: Replay) -> Iterator[HazardReport]:
    """What is illegal in the finished program, each with the pass that left it."""
    if not any(region.inputs_of(Role.CACHE) for region in replay.final.regions.values()):
        return  # it was stopped long before the level that this is about
    if replay.final.config.stop_after not in (None, replay.runs[-1].step.name):
        return
    for problem in violations(replay.final, Level.KERNEL):
        for index, run in enumerate(replay.runs):
            if problem in set(violations(replay.after(index), Level.KERNEL)):
                region = problem.partition(":")[0]
                site = next((s.number for s in run.sites if s.region == region), None)
                yield HazardReport(run.step.name, site, problem)
                break
