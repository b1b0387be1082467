"""Locate a wrong rewrite: the layers in which it is wrong, and the inputs that show it best."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dsa_compile.ir.passes import Numerics
from dsa_compile.ir.program import Program
from dsa_compile.verify.checks.pass_check import capture
from dsa_compile.verify.checks.region_rewrite import whole_example
from dsa_compile.verify.checks.rewrite_check import check_site, try_inputs
from dsa_compile.verify.checks.rewrite_run import SiteRun
from dsa_compile.verify.comparison.agreement import Agreement
from dsa_compile.verify.comparison.delta import Delta, find_delta
from dsa_compile.verify.comparison.stage_calls import compare_calls, run_against
from dsa_compile.verify.comparison.tolerances import pass_problem
from dsa_compile.verify.execution.replay import PassRun, Replay
from dsa_compile.verify.execution.stages import Stage, layer_of, run_stage
from dsa_compile.verify.execution.traces import Trace
from dsa_compile.verify.inputs.exact_weights import ExactWeightStore
from dsa_compile.verify.inputs.parameters import WeightStore
from dsa_compile.verify.inputs.prompt import Prompt


@dataclass(frozen=True)
class Finding:
    """A rewrite in one layer.

    Attributes:
        layer: number of the layer, or ``embed`` or ``head``.
        agreement: how far the two sides of the rewrite agree.
        problem: what is wrong; empty if nothing is.
        example: both sides of the rewrite as they ran; of several graphs, those of the layer that
            shows it best.
    """

    layer: int | str
    agreement: Agreement
    problem: str
    example: SiteRun | None = None


@dataclass(frozen=True)
class Localised:
    """A rewrite in all layers.

    Attributes:
        before: the program before it.
        after: the program with it.
        delta: what it changed, if it computes; of several graphs, the one that shows it best.
        findings: for each call that it changed, in order.
    """

    before: Program
    after: Program
    delta: Delta | None
    findings: tuple[Finding, ...]

    @property
    def wrong(self) -> tuple[Finding, ...]:
        """Findings with a problem."""
        return tuple(finding for finding in self.findings if finding.problem)

    @property
    def worst(self) -> Finding | None:
        """The layer that shows it best; None if no call of a step was changed."""
        key = [(bool(f.problem), f.agreement.error) for f in self.findings]
        return self.findings[key.index(max(key))] if key else None


def localise(
    replay: Replay, store: WeightStore, prompt: Prompt, run: PassRun, number: int
) -> Localised:
    """Run both sides of one rewrite in every layer.

    Args:
        replay: the compilation.
        store: gives the weights.
        prompt: what to run.
        run: the pass.
        number: of the rewrite within it, from 1.
    """
    before = replay.within(run, number - 1)
    after = replay.within(run, number)
    exact = run.step.numerics is not Numerics.BITWISE
    wide = ExactWeightStore(store.source) if exact else None
    site = run.sites[number - 1]
    if not site.region:
        return _whole(before, after, store, wide, prompt, run)
    delta = find_delta(before.regions[site.region], after.regions[site.region])
    if delta is None:
        return Localised(before, after, None, ())
    stores: list[WeightStore] = [store] if wide is None else [store, wide]
    traces = [run_stage(Stage.of(before, each), prompt, watch=True) for each in stores]
    findings = []
    for index, call in enumerate(traces[0].calls):
        if site.region in {region.name for region in call.regions}:
            captures = [
                capture(each, trace, index, before, after)
                for each, trace in zip(stores, traces, strict=True)
            ]
            found = check_site(
                run.step.numerics, delta, prompt, captures[0], captures[1] if wide else None
            )
            worst = found.worst
            # a reproducer shows what the recipe computes, not exact arithmetic
            shown = try_inputs(delta, prompt, captures[0], worst.run.inputs).run
            findings.append(Finding(layer_of(call.call), worst.run.worst, worst.problem, shown))
    return Localised(before, after, delta, tuple(findings))


def _whole(
    before: Program,
    after: Program,
    store: WeightStore,
    wide: ExactWeightStore | None,
    prompt: Prompt,
    run: PassRun,
) -> Localised:
    stages, trace, made = _both(before, after, wide or store, prompt)
    findings = [
        Finding(layer_of(call.call), found, pass_problem(run.step.numerics, found, trace.exact))
        for call, found in zip(trace.calls, compare_calls(trace, made), strict=True)
    ]
    if wide is not None:
        stages, trace, made = _both(before, after, store, prompt)
    example = whole_example(stages, (trace, made), prompt)
    if example is None:
        return Localised(before, after, None, tuple(findings))
    delta, shown = example
    worst = max(findings, key=lambda f: (bool(f.problem), f.agreement.error))
    findings[findings.index(worst)] = replace(worst, example=shown)
    return Localised(before, after, delta, tuple(findings))


def _both(
    before: Program, after: Program, store: WeightStore, prompt: Prompt
) -> tuple[tuple[Stage, Stage], Trace, Trace]:
    stages = Stage.of(before, store), Stage.of(after, store)
    trace = run_stage(stages[0], prompt, watch=True)
    return stages, trace, run_against(stages[1], prompt, trace)


def layers_text(findings: Sequence[Finding]) -> str:
    """``layer 1 only``, ``layers 1-2``, ``all 58 layers``: where of all findings it is wrong."""
    # the layer that drafts is run by two plans, and counts once
    wrong = list(dict.fromkeys(finding.layer for finding in findings if finding.problem))
    count = len({finding.layer for finding in findings})
    numbers = [layer for layer in wrong if isinstance(layer, int)]
    others = [str(layer) for layer in wrong if not isinstance(layer, int)]
    if not wrong:
        return "no layer on its own"
    if count > 1 and len(wrong) == count and not others:
        return f"all {count} layers that it is in"
    parts = ([f"layer{'s' * (len(numbers) > 1)} {_ranges(numbers)}"] if numbers else []) + others
    return ", ".join(parts) + (" only" if len(wrong) == 1 and count > 1 else "")


def _ranges(numbers: Sequence[int]) -> str:
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
