"""A program of several ranks against the same model compiled for one, pass by pass.

Both compilations are stopped behind the same pass and run in exact arithmetic, each call on the
inputs that the unsharded one gave it, in every lane. What ranks hold of a value is put together
as its axes say: parts side by side, terms added, one for all where it is alike. The first pass
behind which a value differs is taken apart, rewrite by rewrite.
"""

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor, fx

from dsa_compile.facts.layout import DP, TP
from dsa_compile.facts.placements import PARTIAL, TOKENS, Placement, Split
from dsa_compile.ir.passes import Pass
from dsa_compile.ir.placement_check import region_problems
from dsa_compile.ir.program import Program
from dsa_compile.passes.added import pipeline_of
from dsa_compile.verify.checks.rewrite_run import in_a_line
from dsa_compile.verify.comparison.agreement import compare
from dsa_compile.verify.comparison.gathered import gathered, rows_of_lanes
from dsa_compile.verify.comparison.sharded_pairs import sharded_pairs
from dsa_compile.verify.comparison.stage_calls import compare_calls, run_against
from dsa_compile.verify.comparison.tolerances import exact_problem
from dsa_compile.verify.execution.handed_selections import comparable_value
from dsa_compile.verify.execution.replay import PassRun, Replay
from dsa_compile.verify.execution.stages import Stage, layer_of, run_stage
from dsa_compile.verify.execution.traces import Trace
from dsa_compile.verify.inputs.exact_weights import ExactWeightStore
from dsa_compile.verify.inputs.parameters import WeightStore
from dsa_compile.verify.inputs.prompt import Prompt

VERSION = 1
"""Version of the JSON of a report; raised whenever a key goes or changes its meaning."""


@dataclass
class PassComparison:
    """The values behind one pass, of all ranks together against those of one.

    Attributes:
        name: of the pass.
        sites: rewrites.
        alike: values compared that are alike on all ranks, over all graphs.
        parts: of which each rank has a part.
        sums: of which each rank has a term.
        error: the largest norm of a row's difference over the norm of the row.
        number: the first wrong rewrite, from 1; None if nothing is wrong.
        where: its graph and module.
        problem: what is wrong; empty if nothing is.
    """

    name: str
    sites: int
    alike: int = 0
    parts: int = 0
    sums: int = 0
    error: float = 0.0
    number: int | None = None
    where: str = ""
    problem: str = ""


@dataclass
class UnshardedReport:
    """A comparison with the program of one rank.

    Attributes:
        layout: of the sharded program.
        tokens: of the prompt.
        passes: from the first that cuts on, as far as the first that is wrong.
        seconds: that it took.
    """

    layout: str
    tokens: int
    passes: list[PassComparison] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def wrong(self) -> PassComparison | None:
        """The first pass behind which a value differs."""
        return next((done for done in self.passes if done.problem), None)

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dict."""
        return {"version": VERSION, "ok": self.wrong is None, **asdict(self)}


def compare_with_unsharded(
    replay: Replay,
    unsharded: Replay,
    store: WeightStore,
    prompt: Prompt,
    progress: Callable[[PassComparison], None] = lambda done: None,
) -> UnshardedReport:
    """Compare a sharded compilation with that of the same model for one rank.

    Args:
        replay: the sharded compilation.
        unsharded: the same passes over the same program, for one rank.
        store: gives the weights.
        prompt: what to run.
        progress: called with each pass compared.
    """
    started = time.perf_counter()
    report = UnshardedReport(str(replay.final.config.layout), len(prompt))
    whole = _Whole(unsharded, ExactWeightStore(store.source), prompt)
    cut = False
    for index, run in enumerate(replay.runs):
        cut |= bool(run.step.cuts)
        if not cut or not run.sites:
            continue
        done = _compare_pass(whole, replay, index, run)
        report.passes.append(done)
        progress(done)
        if done.problem:
            break
    if report.wrong is None and replay.failure is not None:
        name, reason = replay.failure
        report.passes.append(PassComparison(name, 0, problem=f"cannot be run: {reason}"))
    report.seconds = time.perf_counter() - started
    return report


class _Whole:
    """The compilation for one rank, run behind any pass."""

    def __init__(self, replay: Replay, store: ExactWeightStore, prompt: Prompt) -> None:
        self.store = store
        self.prompt = prompt
        self._replay = replay
        self._last: tuple[int, Trace] | None = None

    def behind(self, name: str) -> Trace:
        """Trace of the compilation behind a pass, which it may not have."""
        pipeline = pipeline_of(self._replay.final.config)
        steps = [step.name for step in pipeline if isinstance(step, Pass)]
        upto = set(steps[: steps.index(name) + 1])
        runs = self._replay.runs
        index = max((i for i, run in enumerate(runs) if run.step.name in upto), default=-1)
        if self._last is None or self._last[0] != index:
            program = runs[0].before if index < 0 else self._replay.after(index)
            stage = Stage.of(program, self.store)
            known = None if self._last is None else self._last[1]
            self._last = (index, run_stage(stage, self.prompt, watch=True, known=known))
        return self._last[1]


def _compare_pass(whole: _Whole, replay: Replay, index: int, run: PassRun) -> PassComparison:
    done = PassComparison(run.step.name, len(run.sites))
    trace = whole.behind(run.step.name)
    _compare(done, replay.after(index), trace, whole)
    if not done.problem:
        return done
    for number, program in enumerate(replay.between(run), start=1):
        tried = PassComparison(run.step.name, number)
        _compare(tried, program, trace, whole)
        if tried.problem:
            site = run.sites[number - 1]
            done.number, done.problem = number, tried.problem
            done.where = " ".join(part for part in (site.region, site.path) if part)
            break
    return done


def _compare(done: PassComparison, program: Program, trace: Trace, whole: _Whole) -> None:
    """Count and compare all values of a program; the first problem is kept."""
    for problem in _problems(done, program, trace, whole):
        done.problem = done.problem or problem


def _problems(done: PassComparison, program: Program, trace: Trace, whole: _Whole) -> Iterator[str]:
    layout = program.config.layout
    shared_out: dict[str, dict[fx.Node, Any]] = {a: {} for a in (TP, DP) if layout.along(a) > 1}
    for axis, values in shared_out.items():
        for region in program.regions.values():
            yield from region_problems(region, program.weights.entries(region.kind), values, axis)
    try:
        made = run_against(Stage.of(program, whole.store), whole.prompt, trace)
    except Exception as error:  # whatever an op raises on what no op should be given
        yield f"its program does not run: {in_a_line(error)}"
        return
    counted: set[fx.Node] = set()
    for calls in zip(trace.calls, made.calls, strict=True):
        for number, chunk in enumerate(made.chunks if trace.alike(made) else ()):
            regions = [call.regions[number] for call in calls]
            for theirs, ours in sharded_pairs(*regions):
                shares = {axis: found[ours] for axis, found in shared_out.items() if ours in found}
                both = [
                    comparable_value(region, node.name, call.nodes[number][node.name],
                                     made.batches[number], made.block_size)
                    for region, call, node in zip(regions, calls, (theirs, ours), strict=True)
                ]  # fmt: skip
                if len(shares) < len(shared_out) or not isinstance(both[0], Tensor):
                    continue
                if ours not in counted:
                    counted.add(ours)
                    _count(done, shares.values())
                whole = gathered(both[1], shares, layout)
                if shares.get(DP, TOKENS) != TOKENS:
                    whole = rows_of_lanes(whole, both[0], layout.dp)
                agreement = compare(both[0], whole, chunk.size, chunk.padding)
                done.error = max(done.error, agreement.error)
                problem = exact_problem(agreement, None)
                if problem:
                    layer = layer_of(calls[1].call)
                    yield _sentence(layer, ours, shares, problem)
    for call, agreement in zip(made.calls, compare_calls(trace, made), strict=True):
        done.error = max(done.error, agreement.error)
        problem = exact_problem(agreement, None)
        if problem:
            yield f"layer {layer_of(call.call)} returns what {problem}"


def _count(done: PassComparison, shares: Collection[Placement]) -> None:
    done.sums += PARTIAL in shares
    parts = any(isinstance(share, Split) for share in shares)
    done.parts += parts and PARTIAL not in shares
    done.alike += not parts and PARTIAL not in shares


def _sentence(
    layer: int | str, node: fx.Node, shares: Mapping[str, Placement], problem: str
) -> str:
    what = node.name
    dims = [share.dim for share in shares.values() if isinstance(share, Split)]
    if PARTIAL in shares.values():
        what = f"the sum over ranks of {what}"
    elif dims:
        what = f"{what}, put together along dimension {dims[0]},"
    return f"layer {layer}: {what} {problem}"
