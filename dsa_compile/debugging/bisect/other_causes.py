"""Causes that are no rewrite: weights, kernels, the runtime's options."""

from collections.abc import Iterator

from dsa_compile.debugging.bisect.culprit import Cause
from dsa_compile.debugging.bisect.runtime_check import (
    ANY,
    wrong_engine,
    wrong_option,
    wrong_option_on_device,
)
from dsa_compile.debugging.inputs.prompt import Prompt
from dsa_compile.debugging.recompiled_artifact import RecompiledArtifact
from dsa_compile.debugging.verify.artifact_check import emission_problems
from dsa_compile.debugging.verify.collective_check import collective_reports
from dsa_compile.debugging.verify.kernel_check import (
    KernelReport,
    device_problem,
    wrong_kernels,
)
from dsa_compile.debugging.verify.kernel_process import check_kernels_apart
from dsa_compile.debugging.verify.weight_check import wrong_weights
from dsa_compile.evaluation.loader_check import compare_loaders, misread_weights
from dsa_compile.evaluation.reference_model import NO_MODEL, has_reference
from dsa_compile.layout import ONE_RANK

Found = tuple[Cause, str, str]
"""The kind of cause, which one, and what is wrong with it."""

OtherCauses = tuple[Found | None, tuple[str, ...]]
"""The first cause found, and the kinds that could not be tested, each with the reason."""


def misread_weight(recompiled: RecompiledArtifact) -> Found | None:
    """The first weight or constant of the exported program that transformers has otherwise.

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


def other_causes(recompiled: RecompiledArtifact, prompt: Prompt) -> OtherCauses:
    """The first cause found, and the kinds that could not be tested, each with the reason.

    Args:
        recompiled: the artifact; its rewrites are right, and what its plan makes.
        prompt: what to run.
    """
    program, untested = recompiled.replay.final, []
    if recompiled.dummy:
        untested.append(f"{Cause.WEIGHT.value}s as they are read: random weights")
    elif not has_reference(recompiled.model_dir):
        untested.append(f"{Cause.WEIGHT.value}s as they are read: {NO_MODEL}")
    else:
        layers = [call.index for call in program.layers]
        for difference in compare_loaders(recompiled.model_dir, program.spec, layers):
            return (Cause.WEIGHT, difference.name, difference.problem), ()
        for problem in recompiled.packed_weight_problems():
            return (Cause.WEIGHT, "packed", problem), ()
    if recompiled.artifact.manifest.compile.stop_after:
        rest = f"{Cause.KERNEL.value}s and {Cause.OPTION.value}s"
        return None, (*untested, f"{rest}: the artifact was stopped early, for reading alone")
    target, layout = (
        recompiled.artifact.manifest.target,
        recompiled.artifact.manifest.compile.layout,
    )
    if layout != ONE_RANK:
        return _of_several_ranks(recompiled, untested)
    missing = device_problem(target)
    if missing:
        untested.append(f"{Cause.KERNEL.value}s: {missing}")
    else:
        for kernel in _wrong_kernels(recompiled, prompt):
            return (Cause.KERNEL, str(kernel), kernel.problem), tuple(untested)
    if not recompiled.small:
        return None, (*untested, f"{Cause.OPTION.value}s: the model is too large for the CPU")
    found = wrong_option(recompiled)
    if found is None and target != "cpu":
        if missing or recompiled.dummy:
            untested.append(f"{Cause.OPTION.value} CUDA graphs: {missing or 'random weights'}")
        else:
            found = wrong_option_on_device(recompiled)
    if found is None and target == "cpu":
        found, reason = _as_loaded(recompiled)
        untested += [reason] if reason else []
    return _of_runtime(found), tuple(untested)


def _of_runtime(found: tuple[str, str] | None) -> Found | None:
    """An option of the runtime, or the runtime itself where all options are off."""
    if found is None:
        return None
    return Cause.RUNTIME if found[0] == ANY else Cause.OPTION, *found


def _as_loaded(recompiled: RecompiledArtifact) -> tuple[tuple[str, str] | None, str]:
    """Problem of the engine loaded from the artifact, or the reason why that was not tested."""
    artifact, final = recompiled.artifact, recompiled.replay.final
    if recompiled.dummy or artifact.manifest.weights.mode == "none":
        return None, f"{Cause.RUNTIME.value} as it is loaded: the artifact has no weights"
    if any(emission_problems(artifact, final, recompiled.store, recompiled.dummy)):
        return None, f"{Cause.RUNTIME.value} as it is loaded: the artifact is not what passes make"
    return wrong_engine(recompiled), ""


def _of_several_ranks(recompiled: RecompiledArtifact, untested: list[str]) -> OtherCauses:
    """Collectives, options on one rank, and on a CPU the ranks as an engine starts them."""
    layout = recompiled.artifact.manifest.compile.layout
    for kernel in collective_reports(recompiled.replay.final):
        if kernel.problem:
            return (Cause.KERNEL, str(kernel), kernel.problem), tuple(untested)
    untested.append(f"{Cause.KERNEL.value}s but for collectives: the weights are cut over ranks "
                    f"({layout}); compile for one rank to test them")  # fmt: skip
    if not recompiled.small:
        return None, (*untested, f"{Cause.OPTION.value}s: the model is too large for the CPU")
    found = wrong_option(recompiled.on_one_rank())
    left = f"{Cause.OPTION.value}s on several ranks"
    if recompiled.artifact.manifest.target != "cpu":
        left = "how ranks are sent their steps, and " + left
    elif found is None:
        found, reason = _as_loaded(recompiled)
        untested += [reason] if reason else []
    untested.append(f"{left}: they were tested on the same model compiled for one rank")
    return _of_runtime(found), tuple(untested)


def _wrong_kernels(recompiled: RecompiledArtifact, prompt: Prompt) -> Iterator[KernelReport]:
    """Kernels that are wrong; those of a GPU run in a process of their own."""
    manifest = recompiled.artifact.manifest
    if manifest.target != "cpu":
        yield from (found for found in check_kernels_apart(recompiled, prompt) if found.problem)
        return
    program, store = recompiled.replay.final, recompiled.store
    yield from wrong_kernels(program, manifest.kernels, manifest.target, store, prompt)
