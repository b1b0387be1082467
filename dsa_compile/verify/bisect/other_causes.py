"""Causes that are no rewrite: weights, kernels, the runtime's options."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial

from dsa_compile.facts.layout import ONE_RANK
from dsa_compile.measure.eval.loader_check import compare_loaders, misread_weights
from dsa_compile.measure.eval.reference_model import NO_MODEL, has_reference
from dsa_compile.verify.bisect.culprit import Cause
from dsa_compile.verify.bisect.runtime_check import (
    ANY,
    OptionCheck,
    option_checks,
    wrong_engine,
    wrong_option,
    wrong_option_on_device,
)
from dsa_compile.verify.checks.artifact_check import emission_problems
from dsa_compile.verify.checks.collective_check import collective_reports
from dsa_compile.verify.checks.kernel_check import (
    KernelReport,
    device_problem,
    wrong_kernels,
)
from dsa_compile.verify.checks.kernel_process import check_kernels_apart
from dsa_compile.verify.checks.weight_check import wrong_weights
from dsa_compile.verify.inputs.prompt import Prompt
from dsa_compile.verify.recompiled_artifact import RecompiledArtifact

Found = tuple[Cause, str, str]
"""The kind of cause, which one, and what is wrong with it."""

OtherCauses = tuple[Found | None, tuple[str, ...]]
"""The first cause found, and the kinds that could not be tested, each with the reason."""


def misread_weight(recompiled: RecompiledArtifact) -> Found | None:
    """The first weight or constant of the exported program that differs in transformers.

    A constant is no weight that is read: the export computes it.
    """
    exported = recompiled.exported
    layers = [call.index for call in exported.layers]
    for weight in misread_weights(recompiled.model_dir, exported.spec, layers, exported.weights):
        cause = Cause.EXPORT if weight.computed else Cause.WEIGHT
        return cause, weight.name, f"{weight.error_phrase}, {weight.problem}"
    return None


def weight_cause(recompiled: RecompiledArtifact) -> Found | None:
    """The first weight that is not what its expression says; its rewrite is right in the plan."""
    for weight in wrong_weights(recompiled.replay.final, recompiled.store):
        return Cause.WEIGHT, str(weight), f"{weight.problem}: {weight.expression}"
    return None


def other_causes(results: Iterable[OtherCauses]) -> OtherCauses:
    """The first cause found, and the kinds that could not be tested, each with the reason.

    Args:
        results: of the checks, in their order.
    """
    untested: list[str] = []
    for found, left in results:
        untested += left
        if found is not None:
            return found, tuple(untested)
    return None, tuple(untested)


def other_checks(recompiled: RecompiledArtifact, prompt: Prompt) -> list[Callable[[], OtherCauses]]:
    """Checks of causes that are no rewrite, each good for what is right by those before it.

    Args:
        recompiled: the artifact; its rewrites are right, and what its plan makes.
        prompt: what to run.
    """
    manifest = recompiled.artifact.manifest
    checks = [partial(_as_read, recompiled)]
    if manifest.compile.stop_after:
        rest = f"{Cause.KERNEL.value}s and {Cause.OPTION.value}s"
        reason = f"{rest}: the artifact was stopped early, for reading alone"
        return [*checks, lambda: (None, (reason,))]
    if manifest.compile.layout != ONE_RANK:
        return [*checks, *_of_several_ranks(recompiled)]
    checks.append(partial(_of_kernels, recompiled, prompt))
    if not recompiled.small:
        reason = f"{Cause.OPTION.value}s: the model is too large for the CPU"
        return [*checks, lambda: (None, (reason,))]
    of_options = option_checks(recompiled)
    checks += [partial(_of_option, check) for check in of_options]
    on_device = manifest.target != "cpu"
    return [*checks, partial(_on_device if on_device else _as_loaded, recompiled)]


def _as_read(recompiled: RecompiledArtifact) -> OtherCauses:
    """Weights that are not read as transformers reads them, or not packed as they are read."""
    if recompiled.dummy:
        return None, (f"{Cause.WEIGHT.value}s as they are read: random weights",)
    if not has_reference(recompiled.model_dir):
        return None, (f"{Cause.WEIGHT.value}s as they are read: {NO_MODEL}",)
    program = recompiled.replay.final
    layers = [call.index for call in program.layers]
    for difference in compare_loaders(recompiled.model_dir, program.spec, layers):
        return (Cause.WEIGHT, difference.name, difference.problem), ()
    for problem in recompiled.packed_weight_problems():
        return (Cause.WEIGHT, "packed", problem), ()
    return None, ()


def _of_kernels(recompiled: RecompiledArtifact, prompt: Prompt) -> OtherCauses:
    missing = device_problem(recompiled.artifact.manifest.target)
    if missing:
        return None, (f"{Cause.KERNEL.value}s: {missing}",)
    for kernel in _wrong_kernels(recompiled, prompt):
        return (Cause.KERNEL, str(kernel), kernel.problem), ()
    return None, ()


def _of_option(check: OptionCheck) -> OtherCauses:
    return _of_runtime(check()), ()


def _on_device(recompiled: RecompiledArtifact) -> OtherCauses:
    """Options with the kernels and graphs of a GPU."""
    missing = device_problem(recompiled.artifact.manifest.target)
    if missing or recompiled.dummy:
        reason = f"{Cause.OPTION.value} CUDA graphs: {missing or 'random weights'}"
        return None, (reason,)
    return _of_runtime(wrong_option_on_device(recompiled)), ()


def _of_runtime(found: tuple[str, str] | None) -> Found | None:
    """An option of the runtime, or the runtime itself where all options are off."""
    if found is None:
        return None
    return Cause.RUNTIME if found[0] == ANY else Cause.OPTION, *found


def _as_loaded(recompiled: RecompiledArtifact) -> OtherCauses:
    """Problem of the engine loaded from the artifact, or the reason why that was not tested."""
    artifact, final = recompiled.artifact, recompiled.replay.final
    if recompiled.dummy or artifact.manifest.weights.mode == "none":
        return None, (f"{Cause.RUNTIME.value} as it is loaded: the artifact has no weights",)
    if any(emission_problems(artifact, final, recompiled.store, recompiled.dummy)):
        reason = f"{Cause.RUNTIME.value} as it is loaded: the artifact is not what passes make"
        return None, (reason,)
    return _of_runtime(wrong_engine(recompiled)), ()


def _of_several_ranks(recompiled: RecompiledArtifact) -> list[Callable[[], OtherCauses]]:
    """Collectives, options on one rank, and on a CPU the ranks as an engine starts them."""
    manifest = recompiled.artifact.manifest
    kernels = (
        f"{Cause.KERNEL.value}s but for collectives: the weights are cut over ranks "
        f"({manifest.compile.layout}); compile for one rank to test them"
    )

    def of_collectives() -> OtherCauses:
        for kernel in collective_reports(recompiled.replay.final):
            if kernel.problem:
                return (Cause.KERNEL, str(kernel), kernel.problem), ()
        return None, (kernels,)

    if not recompiled.small:
        reason = f"{Cause.OPTION.value}s: the model is too large for the CPU"
        return [of_collectives, lambda: (None, (reason,))]
    left = f"{Cause.OPTION.value}s on several ranks"
    on_cpu = manifest.target == "cpu"
    if not on_cpu:
        left = "how ranks are sent their steps, and " + left
    left += ": they were tested on the same model compiled for one rank"

    def of_options() -> OtherCauses:
        found = _of_runtime(wrong_option(recompiled.on_one_rank()))
        return found, () if on_cpu and found is None else (left,)

    def as_loaded() -> OtherCauses:
        found, untested = _as_loaded(recompiled)
        return found, (*untested, left)

    return [of_collectives, of_options, *([as_loaded] if on_cpu else [])]


def _wrong_kernels(recompiled: RecompiledArtifact, prompt: Prompt) -> Iterator[KernelReport]:
    """Kernels that are wrong; those of a GPU run in a process of their own."""
    manifest = recompiled.artifact.manifest
    if manifest.target != "cpu":
        yield from (found for found in check_kernels_apart(recompiled, prompt) if found.problem)
        return
    program, store = recompiled.replay.final, recompiled.store
    yield from wrong_kernels(program, manifest.kernels, manifest.target, store, prompt)
