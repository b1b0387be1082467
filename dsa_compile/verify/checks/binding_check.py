"""Check what an artifact for the CPU binds its ops to, beside the checks of its rewrites."""

from dsa_compile.facts.layout import ONE_RANK
from dsa_compile.verify.checks.collective_check import collective_reports
from dsa_compile.verify.checks.kernel_check import KernelReport, check_kernels, worst_of_each
from dsa_compile.verify.inputs.prompt import Prompt
from dsa_compile.verify.recompiled_artifact import RecompiledArtifact


def runs_here(recompiled: RecompiledArtifact) -> bool:
    """Whether the artifact is one that the runtime runs on a CPU."""
    manifest = recompiled.artifact.manifest
    whole = manifest.compile.stop_after is None and recompiled.replay.complete
    return manifest.target == "cpu" and whole


def binding_reports(recompiled: RecompiledArtifact, prompt: Prompt) -> list[KernelReport]:
    """Worst call of a finished program for every op and provider, the worst first.

    The check ends at the first that is wrong: layers that follow would be run by it. Only the
    collectives of a program for several ranks are run, as each rank runs them.

    Args:
        recompiled: see :func:`runs_here`.
        prompt: of which a beginning is run that has a step of every sort.
    """
    program, manifest = recompiled.replay.final, recompiled.artifact.manifest
    if manifest.compile.layout != ONE_RANK:
        return worst_of_each(collective_reports(program))
    topk = program.spec.index_topk
    brief = Prompt.of(prompt.token_ids[: topk + 2], topk, prompt.block_size, brief=True)
    source, found = recompiled.store.source, []
    for report in check_kernels(program, manifest.kernels, manifest.target, source, brief):
        found.append(report)
        if report.problem:
            break
    return worst_of_each(found)
