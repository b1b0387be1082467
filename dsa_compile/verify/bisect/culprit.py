"""``find_culprit``: from a check that fails to the one rewrite that makes it fail."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

from dsa_compile.verify.bisect.criteria import Check
from dsa_compile.verify.bisect.localise import Finding, Localised, layers_text, localise
from dsa_compile.verify.bisect.reproducer import write_reproducer
from dsa_compile.verify.bisect.search import Log, NothingBadError, Trial, first_bad
from dsa_compile.verify.checks.rewrite_run import in_a_line
from dsa_compile.verify.comparison.inserted_ops import inserted_ops
from dsa_compile.verify.execution.replay import Replay, Rewrite
from dsa_compile.verify.inputs.parameters import WeightStore
from dsa_compile.verify.inputs.prompt import Prompt

REPRODUCER = "reproducer"
VERSION = 3
"""Version of the JSON of a result; raised whenever a key goes or changes its meaning."""


class Cause(Enum):
    """Kinds of things that make a check fail, in the order in which they are looked for."""

    EXPORT = "export"
    PASS = "pass"  # one that raises, or breaks its promise
    REWRITE = "pass site"
    WEIGHT = "weight"
    KERNEL = "kernel"
    OPTION = "runtime option"
    RUNTIME = "runtime"  # a module of it that no option leaves out
    ARTIFACT = "artifact"  # its files: they are not what the passes make
    UNKNOWN = "unknown"
    NONE = "none"  # nothing wrong was found


@dataclass(frozen=True)
class Culprit:
    """Result of a bisection.

    Attributes:
        rewrite: the first with which the check fails; None if it is none of them.
        count: rewrites searched.
        trials: programs tried, by this run and by those it resumed.
        resumed: of these, by earlier runs.
        layers: where the rewrite is wrong on its own, to read.
        problem: what is wrong there; empty where no layer shows it alone.
        findings: for each layer with a problem.
        reproducer: the directory written, or None.
        cause: the kind of thing that is wrong.
        name: which one, where it is no rewrite: a pass, a weight, a kernel, an option.
        untested: kinds of cause that could not be tested, each with the reason.
        with_it: the result of the trial with the rewrite and those before it.
        without_it: the result of the trial without it; both are empty where it is no rewrite.
    """

    rewrite: Rewrite | None
    count: int
    trials: int
    resumed: int
    layers: str = ""
    problem: str = ""
    findings: tuple[Finding, ...] = ()
    reproducer: Path | None = None
    cause: Cause = Cause.REWRITE
    name: str = ""
    untested: tuple[str, ...] = ()
    with_it: str = ""
    without_it: str = ""

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dict."""
        return {
            "version": VERSION,
            "cause": self.cause.value,
            "name": self.name or (str(self.rewrite) if self.rewrite else ""),
            "untested": list(self.untested),
            "rewrite": None if self.rewrite is None else asdict(self.rewrite),
            "count": self.count,
            "trials": self.trials,
            "resumed": self.resumed,
            "layers": self.layers,
            "problem": self.problem,
            "with_it": self.with_it,
            "without_it": self.without_it,
            "findings": [{"layer": f.layer, "problem": f.problem} for f in self.findings],
            "reproducer": None if self.reproducer is None else str(self.reproducer),
        }


def find_culprit(
    replay: Replay,
    store: WeightStore,
    prompt: Prompt,
    check: Check,
    log: Log,
    out: Path | None = None,
    progress: Callable[[Trial], None] = lambda trial: None,
) -> Culprit:
    """Find the first rewrite with which a check fails, and the layers in which it is wrong.

    Args:
        replay: the compilation.
        store: gives the weights with which the rewrite is located.
        prompt: the tokens with which it is located.
        check: fails with all rewrites.
        log: keeps the trials.
        out: where the reproducer goes; None for none.
        progress: called with each trial.

    Raises:
        NothingBadError: the check passes with all rewrites, and all passes ran.
    """
    try:
        position = first_bad(check.count, check.trial, log, progress, check.subject)
    except NothingBadError:
        if replay.failure is None:
            raise
        return _failed(replay, check, log)
    trials = (check.count, len(log.trials), log.resumed)
    if position == 0:
        return Culprit(None, *trials, cause=Cause.UNKNOWN)
    found = explain(replay, store, prompt, check.rewrite(position), trials, out)
    tried = [log.known(place) for place in (position, position - 1)]
    with_it, without_it = ("" if trial is None else trial.detail for trial in tried)
    return replace(found, with_it=with_it, without_it=without_it)


def _failed(replay: Replay, check: Check, log: Log) -> Culprit:
    """All that could be made is right, and the next pass cannot be run on it."""
    assert replay.failure is not None
    name, reason = replay.failure
    return Culprit(
        None,
        check.count,
        len(log.trials),
        log.resumed,
        problem=f"the rewrites before it are right, and it cannot be run on them: {reason}",
        cause=Cause.PASS,
        name=name,
    )


def explain(
    replay: Replay,
    store: WeightStore,
    prompt: Prompt,
    rewrite: Rewrite,
    trials: tuple[int, int, int],
    out: Path | None = None,
) -> Culprit:
    """A wrong rewrite, looked at in every layer.

    Args:
        replay: the compilation.
        store: gives the weights.
        prompt: the tokens to run.
        rewrite: which.
        trials: rewrites searched, trials made, trials resumed.
        out: where the reproducer goes; None for none.
    """
    run = next(run for run in replay.runs if run.step.name == rewrite.pass_name)
    try:
        found = localise(replay, store, prompt, run, rewrite.number)
    except Exception as error:  # whatever a wrong graph or plan leads to: the rewrite is known
        return Culprit(rewrite, *trials, problem=f"does not run on its own: {in_a_line(error)}")
    problem = _problem(found) or "shown by the whole layer alone"
    ops = inserted_ops(found.before, found.after)
    made = out is not None and write_reproducer(out / REPRODUCER, rewrite, found)
    return Culprit(
        rewrite,
        *trials,
        layers=layers_text(found.findings),
        problem="; ".join(text for text in (problem, ops) if text),
        findings=found.wrong,
        reproducer=out / REPRODUCER if out is not None and made else None,
    )


def _problem(found: Localised) -> str:
    worst = found.worst
    if worst is None or not worst.problem:
        return ""
    example = worst.example
    if example is None:
        return worst.problem
    pair = max(example.agreements, key=lambda p: example.agreements[p].error)
    b, a = pair
    return f"{b if a == b else f'{b} → {a}'} {worst.problem}, {example.inputs} inputs"
