"""Check one rewrite in one layer: its bits, or its exact arithmetic and its rounding."""

from dataclasses import dataclass

import torch

from dsa_compile.ir.passes import Numerics
from dsa_compile.verify.checks.rewrite_run import (
    SiteError,
    SiteRun,
    run_site,
    tensors_of,
)
from dsa_compile.verify.checks.variations import CAPTURED, VARIATIONS
from dsa_compile.verify.comparison.agreement import UNLIKE
from dsa_compile.verify.comparison.delta import Delta
from dsa_compile.verify.comparison.rounding import Rounding, rounding_errors
from dsa_compile.verify.comparison.tolerances import (
    REORDERED,
    bitwise_problem,
    exact_problem,
    finite_problem,
    rounding_problem,
)
from dsa_compile.verify.execution.stages import StageWeights
from dsa_compile.verify.execution.traces import CallTrace, Trace
from dsa_compile.verify.inputs.prompt import Prompt

LARGE = "large"


@dataclass(frozen=True)
class Capture:
    """A call of a stage that has every input of the two sides of a rewrite.

    Attributes:
        call: the layer, watched.
        trace: what ``call`` belongs to.
        weights: of the stage before the rewrite, and after it.
    """

    call: CallTrace
    trace: Trace
    weights: tuple[StageWeights, StageWeights]


@dataclass(frozen=True)
class Tried:
    """Both sides of a rewrite on one set of inputs.

    Attributes:
        run: what they gave.
        problem: what is wrong; empty if nothing is.
        exact: whether they ran in exact arithmetic.
    """

    run: SiteRun
    problem: str = ""
    exact: bool = False


@dataclass(frozen=True)
class SiteCheck:
    """One rewrite in one layer, on all inputs.

    Attributes:
        tried: each set of inputs; at least one.
        rounding: of the value whose error grew most; None for a rewrite that rounds nothing.
    """

    tried: tuple[Tried, ...]
    rounding: Rounding | None = None

    @property
    def worst(self) -> Tried:
        """The inputs on which the rewrite does worst: first those with a problem."""
        return max(self.tried, key=lambda t: (bool(t.problem), t.exact, t.run.worst.error))

    @property
    def problem(self) -> str:
        """Problem on the worst inputs; empty if there is none."""
        return self.worst.problem

    def reordered(self, delta: Delta) -> bool:
        """Whether bits differ no more than another order of fp32 sums and products explains."""
        of = {node.name: node.meta.get("val") for node in delta.after.region.graph.nodes}
        values = [value for _, after in delta.pairs for value in tensors_of(of[after])]
        return all(value.dtype is torch.float32 for value in values) and all(
            tried.run.worst.error <= REORDERED and tried.run.worst.overlap is None
            for tried in self.tried
        )

    def extend(self, plain: Capture, exact: Capture | None) -> None:
        """Add what the replacement made to the traces: the next rewrite may take it."""
        for capture in (plain, exact):
            if capture is None:
                continue
            made = [t for t in self.tried if t.exact is capture.trace.exact]
            for step in made[0].run.steps if made and made[0].run.inputs == CAPTURED else ():
                step.extend(capture.call)


def check_site(
    numerics: Numerics,
    delta: Delta,
    prompt: Prompt,
    plain: Capture,
    exact: Capture | None,
    hard: bool = True,
) -> SiteCheck:
    """Try a rewrite on captured inputs first, then on those made from them.

    Args:
        numerics: what its pass promises.
        delta: the rewrite.
        prompt: what was traced.
        plain: the layer as the recipe rounds it.
        exact: the layer in exact arithmetic; None for a pass that promises the same bits.
        hard: whether to make hard inputs of the captured ones.
    """
    varies = hard and delta.varies
    if numerics is Numerics.BITWISE or exact is None:
        inputs = tuple(VARIATIONS) if varies else (CAPTURED,)
        return SiteCheck(
            tuple(try_inputs(delta, prompt, plain, name, bits=True) for name in inputs)
        )
    names = [name for name in VARIATIONS if name != LARGE] if varies else [CAPTURED]
    tried = [try_inputs(delta, prompt, plain, CAPTURED)]
    tried += [try_inputs(delta, prompt, exact, name) for name in names]
    if varies:
        tried.append(try_inputs(delta, prompt, plain, LARGE))
    captured = tried[0]
    if captured.problem:
        return SiteCheck(tuple(tried))
    errors = rounding_errors(
        delta, plain.call, plain.trace, prompt, exact.weights[0], captured.run.steps
    )
    worst = max(errors, key=lambda rounding: rounding.ratio, default=None)
    if worst is not None:
        tried[0] = Tried(captured.run, rounding_problem(worst))
    return SiteCheck(tuple(tried), worst)


def try_inputs(
    delta: Delta, prompt: Prompt, capture: Capture, inputs: str, bits: bool = False
) -> Tried:
    """Run both sides on one set of inputs, as the trace of the capture rounds or does not."""
    exact = capture.trace.exact
    try:
        made = run_site(delta, capture.call, capture.trace, prompt, capture.weights, inputs)
    except SiteError as error:
        unlike = dict.fromkeys(delta.pairs, UNLIKE)
        failed = SiteRun(inputs, unlike, None, (error.step,))
        return Tried(failed, f"does not run: {error}", exact)
    if bits:
        problem = bitwise_problem(made.worst)
    elif exact:
        problem = exact_problem(made.worst, made.choice, inputs)
    else:
        problem = finite_problem(made.worst)
    return Tried(made, problem, exact)
