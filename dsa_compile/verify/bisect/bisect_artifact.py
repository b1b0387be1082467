"""``dsa-inspect bisect``: everything ordered that may be wrong, one kind of cause after another.

Where the check compares with the reference: how the model was exported and its weights read; the
passes, rewrite by rewrite; their rounding; the weights that the plan makes; the kernels that are
bound; the runtime's options; the files that were written. The result names causes that
could not be tested.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from dsa_compile.artifact.records import Producer
from dsa_compile.errors import UserError
from dsa_compile.verify.bisect.command_check import CommandCheck
from dsa_compile.verify.bisect.compiler_digest import compiler_digest
from dsa_compile.verify.bisect.criteria import Check, ReferenceCheck, TokensCheck
from dsa_compile.verify.bisect.culprit import Cause, Culprit, explain, find_culprit
from dsa_compile.verify.bisect.localise import Finding, layers_text
from dsa_compile.verify.bisect.other_causes import (
    Found,
    OtherCauses,
    misread_weight,
    other_causes,
    other_checks,
    weight_cause,
)
from dsa_compile.verify.bisect.search import STATE, Log, NothingBadError, Trial
from dsa_compile.verify.checks.hazard_check import STREAMS
from dsa_compile.verify.checks.plan_check import PLAN
from dsa_compile.verify.checks.report import HazardReport, VerifyReport
from dsa_compile.verify.checks.verify_compilation import verify
from dsa_compile.verify.execution.replay import Replay
from dsa_compile.verify.execution.shared_jobs import results_in_turn, shared_jobs
from dsa_compile.verify.inputs.prompt import Prompt
from dsa_compile.verify.inputs.reference import LIMIT, compare_with_transformers
from dsa_compile.verify.recompiled_artifact import RecompiledArtifact

_BEYOND = ", their rounding, and all else that could be tested: weights, kernels, runtime, files"


def bisect_artifact(
    recompiled: RecompiledArtifact,
    prompt: Prompt,
    expected: Sequence[int] | None,
    command: str | None,
    limit: float | None,
    out: Path,
    progress: Callable[[Trial], None],
) -> Culprit:
    """Bisect an artifact.

    Args:
        recompiled: the artifact.
        prompt: the tokens to run, and to look at the culprit with.
        expected: token ids that should follow the prompt, or None.
        command: a check, or None; where both are None, the reference is.
        limit: of the error against the reference; None for what fp64 explains.
        out: directory for the trials and the reproducer; made if it is missing.
        progress: called with each trial.

    Raises:
        UserError: a check of the user's passes on the artifact, or ``out`` cannot be used.
    """
    check = _check(recompiled, prompt, expected, command, limit)
    untested: tuple[str, ...] = ()
    if isinstance(check, ReferenceCheck):
        if (reason := recompiled.no_reference) is not None:
            untested = (f"{Cause.EXPORT.value}: {reason}",)
        else:  # given their inputs, layers agree also where the plan leaves one out
            early = _blame(recompiled, prompt, check, Culprit(None, check.count, 0, 0))
            if early.findings:
                misread = misread_weight(recompiled)
                trials = (check.count, 0, 0)
                return early if misread is None else _not_a_rewrite(misread, trials, ())
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{out}: cannot be made ({error.strerror}); give another --out") from None
    replay, store = recompiled.replay, recompiled.store
    digests = f"{recompiled.artifact.manifest.digest} by {compiler_digest(replay.final)}"
    key = f"{check.key}; {check.count} rewrites of {digests}; prompt {list(prompt.token_ids)}"
    log = Log.open(key, out / STATE)
    with ExitStack() as stack:
        checks = other_checks(recompiled, prompt)
        rest: Callable[[], list[OtherCauses]] = partial(results_in_turn, checks, _is_found)
        processes = recompiled.processes
        whole = isinstance(check, ReferenceCheck) and limit is None
        if whole and processes > 1 and recompiled.artifact.manifest.target == "cpu":
            # Started first, as it takes the longest. Not for a GPU: a forked process cannot use one
            # that its parent has begun to use.
            rest = stack.enter_context(shared_jobs(checks, _is_found))
            processes -= 1
        try:
            found = find_culprit(replay, store, prompt, check, log, out, progress)
        except NothingBadError as nothing:
            if isinstance(check, TokensCheck):
                raise UserError(
                    f"{nothing}; weights, kernels and runtime options were not tested: "
                    "--against reference does"
                ) from None
            if not isinstance(check, ReferenceCheck):
                raise
            if limit is not None:
                left = f"what --limit {limit} allows, and all that is no rewrite: leave it out"
                return _nothing_wrong(recompiled, log, "", (*untested, left))
            trials = (replay.count, len(log.trials), log.resumed)
            beyond = _beyond_rewrites(recompiled, prompt, trials, out, rest, processes)
            untested = (*untested, *beyond.untested)
            if beyond.cause is Cause.NONE:
                return _nothing_wrong(recompiled, log, _BEYOND, untested)
            return replace(beyond, untested=untested)
    if found.rewrite is None and found.cause is Cause.UNKNOWN:
        found = _blame(recompiled, prompt, check, found)
    return replace(found, untested=untested)


def _check(
    recompiled: RecompiledArtifact,
    prompt: Prompt,
    expected: Sequence[int] | None,
    command: str | None,
    limit: float | None,
) -> Check:
    replay, store = recompiled.replay, recompiled.store
    if command is not None:
        return CommandCheck(recompiled, command)
    if expected is not None:
        for token in expected:
            if not 0 <= token < recompiled.exported.spec.vocab_size:
                raise UserError(f"--expect: the model has no token {token}")
        block_size = recompiled.artifact.manifest.block_size
        return TokensCheck(replay, store, prompt.token_ids, expected, block_size)
    return ReferenceCheck(replay, store, prompt, recompiled.exported, limit)


def _is_found(result: OtherCauses) -> bool:
    return result[0] is not None


def _beyond_rewrites(
    recompiled: RecompiledArtifact,
    prompt: Prompt,
    trials: tuple[int, int, int],
    out: Path,
    rest: Callable[[], Iterable[OtherCauses]],
    processes: int,
) -> Culprit:
    """No rewrite is wrong in exact arithmetic: their rounding, and then what is no rewrite.

    Args:
        recompiled: the artifact.
        prompt: what to run.
        trials: made so far.
        out: directory for the reproducer.
        rest: gives the results of the checks of causes that are no rewrite.
        processes: among which passes are divided.
    """
    weight = weight_cause(recompiled)  # first: its pass rounds wrongly too, and is right
    if weight is not None:
        return _not_a_rewrite(weight, trials, ())
    report = verify(recompiled.replay, recompiled.store, prompt, processes=processes)
    found = _in_report(recompiled, prompt, report, trials, out)
    if found is not None:
        return found
    other, untested = other_causes(rest())
    other = other or _as_written(recompiled)
    if other is not None:
        return _not_a_rewrite(other, trials, untested)
    return Culprit(None, *trials, cause=Cause.NONE, untested=untested)


def _in_report(
    recompiled: RecompiledArtifact,
    prompt: Prompt,
    report: VerifyReport,
    trials: tuple[int, int, int],
    out: Path,
) -> Culprit | None:
    """The worst that ``verify`` finds; None if all is right."""
    if report.wrong:
        worst = max(report.wrong, key=lambda site: (site.ratio or 0.0, -site.position))
        rewrite = recompiled.replay.rewrite(worst.position)
        return explain(recompiled.replay, recompiled.store, prompt, rewrite, trials, out)
    for done in report.passes:
        if done.problem:
            cause, name = Cause.PASS, done.name
            return Culprit(None, *trials, problem=done.problem, cause=cause, name=name)
    for hazard in report.hazards:
        return _hazard(recompiled.replay, hazard, trials)
    return None


def _as_written(recompiled: RecompiledArtifact) -> Found | None:
    """First difference of the artifact's files from what this installation makes, if it wrote them.

    Differences of files that another installation wrote are noted only.
    """
    if recompiled.artifact.manifest.producer != Producer.current():
        return None
    found = next(iter(recompiled.problems()), None)
    return None if found is None else (Cause.ARTIFACT, "as it is written", found)


def _nothing_wrong(
    recompiled: RecompiledArtifact, log: Log, beyond: str, untested: tuple[str, ...]
) -> Culprit:
    trials = (recompiled.replay.count, len(log.trials), log.resumed)
    problem = f"the finished graphs ({log.trials[-1].detail}){beyond}"
    return Culprit(None, *trials, problem=problem, cause=Cause.NONE, untested=untested)


def _hazard(replay: Replay, hazard: HazardReport, trials: tuple[int, int, int]) -> Culprit:
    """Culprit of a hazard: a rewrite, a whole pass, the plan, or the runtime's streams."""
    name, problem = hazard.pass_name, hazard.problem
    run = next((run for run in replay.runs if run.step.name == name), None)
    if run is not None and hazard.number is not None:
        return Culprit(replay.rewrite(run.first + hazard.number), *trials, problem=problem)
    cause = {STREAMS: Cause.RUNTIME, PLAN: Cause.EXPORT}.get(name, Cause.PASS)
    return Culprit(None, *trials, problem=problem, cause=cause, name=name)


def _not_a_rewrite(
    found: Found, trials: tuple[int, int, int], untested: tuple[str, ...]
) -> Culprit:
    cause, name, problem = found
    return Culprit(None, *trials, problem=problem, cause=cause, name=name, untested=untested)


def _blame(recompiled: RecompiledArtifact, prompt: Prompt, check: Check, found: Culprit) -> Culprit:
    """Culprit with what to look at when the check fails without any rewrite."""
    if isinstance(check, CommandCheck):
        names = ", ".join(check.required)
        return replace(
            found,
            problem=f"or one of those that no artifact runs without, which were always on: {names}",
            layers="--against reference and --expect can leave those out too",
        )
    if (reason := recompiled.no_reference) is not None:
        return replace(found, problem=f"there is no reference to tell more: {reason}")
    layers = compare_with_transformers(recompiled, prompt)
    findings = [
        Finding(layer, agreement, "differs" if agreement.error > LIMIT else "")
        for layer, agreement in layers.items()
    ]
    wrong = tuple(finding for finding in findings if finding.problem)
    if not wrong:
        return replace(found, problem="the exported program agrees with transformers' model: the "
                       "check itself expects something else")  # fmt: skip
    return replace(
        found,
        problem="the exported program differs from transformers' model: look at its layer plan, "
        "its weight plan and how its weights are read",
        layers=f"differs in: {layers_text(findings)}",
        findings=wrong,
        cause=Cause.EXPORT,
    )
