"""Check one pass: every rewrite where it was made, in every layer, and the pass as a whole.

A rewrite is checked on its own: matched subgraph against replacement, on what the layers of the
program just before its pass saw of a prompt, and on inputs made from that to be hard. So an error
is found where it was made, however many layers and passes blur it later. A pass is checked as a
whole too: each layer, given the same inputs before and after it, must return the same. What
promises the same bits is run as the recipe rounds; anything else in exact arithmetic, where only a
wrong rewrite differs, and then for its rounding.
"""

import math
from dataclasses import dataclass, replace

from dsa_compile.ir.passes import Numerics
from dsa_compile.ir.plan import Call
from dsa_compile.ir.program import Program
from dsa_compile.ir.region import Role
from dsa_compile.ir.site import Site
from dsa_compile.verify.checks.report import PassReport, SiteReport
from dsa_compile.verify.checks.rewrite_check import Capture, SiteCheck, check_site
from dsa_compile.verify.checks.rewrite_run import in_a_line
from dsa_compile.verify.checks.weight_check import wrong_new_weights
from dsa_compile.verify.comparison.agreement import Agreement
from dsa_compile.verify.comparison.delta import find_delta
from dsa_compile.verify.comparison.inserted_ops import inserted_ops
from dsa_compile.verify.comparison.stage_calls import compare_calls, run_against
from dsa_compile.verify.comparison.tolerances import EXACT, RATIO, pass_problem
from dsa_compile.verify.execution.memory import refuse_without_memory
from dsa_compile.verify.execution.replay import PassRun, Replay
from dsa_compile.verify.execution.stages import Stage, StageWeights, layer_of, run_stage
from dsa_compile.verify.execution.traces import Trace
from dsa_compile.verify.inputs.exact_weights import ExactWeightStore
from dsa_compile.verify.inputs.parameters import WeightStore
from dsa_compile.verify.inputs.prompt import Prompt


@dataclass(frozen=True)
class _Captured:
    """A program and what its layers saw of the prompt."""

    program: Program
    trace: Trace


@dataclass
class _Traces:
    """The last programs captured as the recipe rounds them, and in exact arithmetic."""

    plain: _Captured | None = None
    exact: _Captured | None = None


class PassChecker:
    """Checks passes in their order.

    Args:
        replay: the compilation.
        store: gives the weights.
        prompt: what to run.

    Attributes:
        sites: the rewrites of all passes checked.
        broken: whether a program did not run; nothing can be captured behind it.
    """

    def __init__(self, replay: Replay, store: WeightStore, prompt: Prompt) -> None:
        self.replay = replay
        self.store = store
        self.exact = ExactWeightStore(store.source, store.exact_kept)
        self.prompt = prompt
        self.sites: list[SiteReport] = []
        self.broken = False
        self._known = _Traces()
        self._of_order = True  # whether all that is wrong of a pass may be the order of sums

    def skip(self) -> None:
        """The next pass to be checked is not the one behind the last."""
        self._known = _Traces()

    def check(self, index: int, run: PassRun, until: int | None = None) -> PassReport:
        """Check one pass; what is captured behind it serves the next.

        Args:
            index: of the pass.
            run: the same.
            until: number of the last rewrite to check: behind it ranks share no program.
        """
        traces, self._known = self._known, _Traces()
        if _hands_on(run.before, self.replay.after(index)):
            traces = _Traces()  # what a layer takes must be what the layer before it returns
        first, self._of_order = len(self.sites), True
        done = self._check(index, run, until, run.step.numerics, traces)
        wrong = [site for site in self.sites[first:] if site.problem]
        if run.step.numerics is not Numerics.BITWISE or not (wrong and self._of_order):
            return done
        bits = self.sites[first:]
        del self.sites[first:]
        again = self._check(index, run, until, Numerics.TOLERANCE, traces)
        if again.problem:
            self.sites[first:] = bits
            return done
        again.note = _note(max(wrong, key=lambda site: site.error))
        return again

    def _check(
        self, index: int, run: PassRun, until: int | None, numerics: Numerics, traces: _Traces
    ) -> PassReport:
        """Check one pass, held to ``numerics``, from the last traces on."""
        done = PassReport(run.step.name, run.step.numerics.value, len(run.sites))
        exact = numerics is not Numerics.BITWISE
        after, captured = self.replay.after(index), False
        try:
            plain = self._capture(run.before, self.store, traces.plain)
            wide = self._capture(run.before, self.exact, traces.exact) if exact else None
            before, captured = run.before, True
            for site, then in zip(run.sites, self.replay.between(run), strict=True):
                if site.region and (until is None or site.number <= until):
                    self._site(done, numerics, plain, wide, run, site, before, then)
                before = then
            made = self._whole(done, wide or plain, run, after)
        except Exception as error:  # whatever an op raises on inputs that no op should be given
            if not captured:
                refuse_without_memory(error, f"the program in front of {run.step.name}")
            done.problem = done.problem or f"its program does not run: {in_a_line(error)}"
            self.broken, self._of_order = True, False
            return done
        if made is not None and not done.problem:  # the next pass is captured on the same inputs
            last = _Captured(after, made)
            before_it = _Captured(run.before, plain)
            self._known = _Traces(before_it, last) if exact else _Traces(last, traces.exact)
        return done

    def _capture(self, program: Program, store: WeightStore, known: _Captured | None) -> Trace:
        """Run the layers of a program, on the inputs of those captured last, if any."""
        if known is not None and known.program is program:
            return known.trace
        stage = Stage.of(program, store)
        if known is not None and stage.takes_as(known.trace, self.prompt):
            return run_against(stage, self.prompt, known.trace)
        return run_stage(stage, self.prompt, watch=True)

    def _site(
        self,
        done: PassReport,
        numerics: Numerics,
        plain: Trace,
        wide: Trace | None,
        run: PassRun,
        site: Site,
        before: Program,
        after: Program,
    ) -> None:
        delta = find_delta(before.regions[site.region], after.regions[site.region])
        if delta is None:
            return
        hard = True  # in one layer: the others run the same graph, on other weights
        for index, captured in enumerate(plain.calls):
            if site.region not in {region.name for region in captured.regions}:
                continue
            rounded = capture(self.store, plain, index, before, after)
            exact = None if wide is None else capture(self.exact, wide, index, before, after)
            found = check_site(numerics, delta, self.prompt, rounded, exact, hard)
            self._of_order &= not found.problem or found.reordered(delta)
            hard = False
            found.extend(rounded, exact)
            done.runs += len(found.tried)
            reported = site_report(run, site, layer_of(captured.call), found)
            if reported.problem:
                made = self._wrong_weights(captured.call, before, after)
                told = _told(reported.problem + made, before, after)
                reported = replace(reported, problem=told)
            self._add(done, reported)

    def _wrong_weights(self, call: Call, before: Program, after: Program) -> str:
        """The first weight that a rewrite brings and the runtime makes wrongly, for a problem."""
        for weight in wrong_new_weights(call, before.weights, after.weights, self.store):
            return f"; weight {weight} {weight.problem}: {weight.expression}"
        return ""

    def _add(self, done: PassReport, reported: SiteReport) -> None:
        done.error = max(done.error, reported.error)
        self.sites.append(reported)
        if reported.problem and not done.problem:
            done.problem = f"site {reported.number} {reported.problem}"

    def _whole(self, done: PassReport, trace: Trace, run: PassRun, after: Program) -> Trace | None:
        """Check what layers return; gives the trace if they return the same."""
        made = run_against(self._stage(after, trace), self.prompt, trace)
        results = _by_layer(trace, made)
        for layer, found in results.items():
            done.layers[str(layer)] = (found.typical, found.error)
        problem = self._wrong(run, results, trace.exact)
        if problem and not done.problem:
            done.suspect = number = self._suspect(trace, run)
            sides = (self.replay.within(run, n) for n in (number - 1, number))
            done.problem = _told(problem, *sides)
        same = trace.exact or all(found.bitwise for found in results.values())
        return made if same and not problem and trace.alike(made) else None

    def _stage(self, program: Program, trace: Trace) -> Stage:
        return Stage.of(program, self.exact if trace.exact else self.store)

    def _wrong(self, run: PassRun, results: dict[int | str, Agreement], exact: bool) -> str:
        for layer, found in results.items():
            problem = pass_problem(run.step.numerics, found, exact)
            if problem:
                where = f"layer {layer}" if isinstance(layer, int) else layer
                return f"what {where} returns {problem}"
        return ""

    def _suspect(self, trace: Trace, run: PassRun) -> int:
        """The first rewrite with which the pass goes wrong, by halving."""
        good, bad = 0, len(run.sites)
        while bad - good > 1:
            middle = (good + bad) // 2
            stage = self._stage(self.replay.within(run, middle), trace)
            made = run_against(stage, self.prompt, trace)
            if self._wrong(run, _by_layer(trace, made), trace.exact):
                bad = middle
            else:
                good = middle
        return bad


def _hands_on(before: Program, after: Program) -> bool:
    """Whether calls take values of others that they did not take before."""
    taken = [
        {
            (region.kind, node.meta["key"])
            for region in program.regions.values()
            for node in region.inputs_of(Role.VALUE)
        }
        for program in (before, after)
    ]
    return not taken[1] <= taken[0]


def capture(
    store: WeightStore,
    trace: Trace,
    index: int,
    before: Program,
    after: Program,
) -> Capture:
    """A call of a trace, with the weights of the stages before and after a rewrite."""
    weights = (StageWeights(store, before.weights), StageWeights(store, after.weights))
    return Capture(trace.calls[index], trace, weights)


def site_report(run: PassRun, site: Site, layer: int | str, found: SiteCheck) -> SiteReport:
    """A checked rewrite as data."""
    worst, rounding = found.worst, found.rounding
    agreements = worst.run.agreements
    exact = [t.run.worst.error for t in found.tried if t.exact]
    healthy = 0.0 if rounding is None else math.hypot(rounding.before, rounding.format)
    choice = next((t.run.choice for t in found.tried if t.run.choice is not None), None)
    values = max(agreements, key=lambda p: agreements[p].error, default=("", ""))
    return SiteReport(
        position=run.first + site.number,
        pass_name=run.step.name,
        number=site.number,
        region=site.region,
        path=site.path,
        layer=layer,
        inputs=worst.run.inputs,
        bitwise=all(t.run.worst.bitwise for t in found.tried if not t.exact),
        error=worst.run.worst.error if rounding is None else rounding.after,
        max_abs=worst.run.worst.max_abs,
        overlap=worst.run.worst.overlap if choice is None else choice.overlap,
        margin=None if choice is None else choice.margin,
        deficit=None if choice is None else choice.deficit,
        tolerance=healthy * RATIO if rounding is not None else EXACT if exact else 0.0,
        healthy=healthy,
        ratio=None if rounding is None else rounding.ratio,
        exact=max(exact, default=None),
        values=values,
        problem=worst.problem,
    )


def _told(problem: str, before: Program, after: Program) -> str:
    """A problem with the ops that a rewrite inserts: one of these may be wrong, not the rewrite."""
    ops = inserted_ops(before, after)
    return f"{problem}; {ops}" if ops else problem


def _note(site: SiteReport) -> str:
    return (
        f"promises equal bits; at site {site.number} fp32 values differ by {site.error:.1e}, as "
        "another order of a sum or product does, and in exact arithmetic not at all"
    )


def _by_layer(before: Trace, after: Trace) -> dict[int | str, Agreement]:
    found: dict[int | str, Agreement] = {}
    for call, agreement in zip(before.calls, compare_calls(before, after), strict=True):
        layer = layer_of(call.call)  # that which drafts is run by two plans
        found[layer] = found.get(layer, Agreement()).and_(agreement)
    return found
