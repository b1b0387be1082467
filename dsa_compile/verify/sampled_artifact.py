"""An artifact that is too wide to be run in exact arithmetic, with a sample of its model.

A model with fewer experts and heads is compiled by the passes of this installation, and must be
rewritten as the artifact's model is: the same sites of the same passes, and the same calls behind
each of them. What is found in its rewrites then holds for the artifact's.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from dsa_compile.errors import UserError
from dsa_compile.frontend.build import build_program
from dsa_compile.ir.region import Region
from dsa_compile.ir.streams import has_streams
from dsa_compile.ops.streams import STREAM_OPS
from dsa_compile.verify.execution.replay import PassRun, Replay
from dsa_compile.verify.inputs.parameters import RandomParameters, WeightStore
from dsa_compile.verify.inputs.sample import EXPERTS, KEPT_BYTES, Sample, is_wide, sample_of
from dsa_compile.verify.inputs.sampled_parameters import SampledParameters
from dsa_compile.verify.recompiled_artifact import RecompiledArtifact


@dataclass(frozen=True)
class SampledArtifact:
    """Sample of an artifact's model, made by :func:`sampled_artifact`.

    Attributes:
        sample: what is kept of the model.
        small: the model with that alone, compiled.
    """

    sample: Sample
    small: RecompiledArtifact


def too_wide(recompiled: RecompiledArtifact) -> bool:
    """Whether a sample is to be run in place of an artifact's model."""
    return is_wide(recompiled.exported.spec, recompiled.artifact.manifest.stored_layers)


def sampled_artifact(
    recompiled: RecompiledArtifact, experts: int = EXPERTS, ids: Sequence[int] = ()
) -> SampledArtifact:
    """Compile a sample of an artifact's model.

    Args:
        recompiled: the artifact.
        experts: how many of each layer.
        ids: of tokens that will be run.

    Raises:
        UserError: no such number of experts can be kept, or the sample is compiled differently.
    """
    whole, config = recompiled.exported.spec, recompiled.exported.config
    sample = sample_of(whole, config, experts, ids)
    config = replace(config, layers=sample.layers)
    exported = build_program(recompiled.model_dir, config, sizes=sample.sizes)
    replay = Replay(exported)
    difference = _difference(recompiled.replay, replay)
    if difference:
        raise UserError(
            f"{recompiled.artifact.path}: a sample of its experts cannot stand in for it: "
            f"{difference}; give another number with --experts"
        )
    layers = {call.layer for call in exported.calls if call.layer is not None}
    source = (
        RandomParameters(exported.spec, layers)
        if recompiled.dummy
        else SampledParameters(
            recompiled.store.source, whole, exported.spec, layers, sample.experts, sample.tokens
        )
    )
    store = WeightStore(source, exact_kept=KEPT_BYTES)
    small = replace(recompiled, exported=exported, replay=replay, store=store, sampled=True)
    return SampledArtifact(sample, small)


def _difference(whole: Replay, small: Replay) -> str:
    """The first pass that rewrites two models differently; empty if none does."""
    for index, pair in enumerate(zip_longest(whole.runs, small.runs)):
        mine, other = pair
        if mine is None or other is None or mine.step.name != other.step.name:
            return "another pass runs on it"
        if _sites(mine) != _sites(other):
            return f"{mine.step.name} makes other rewrites in it"
        ours, theirs = (replay.after(index).regions for replay in (whole, small))
        for name in ours.keys() | theirs.keys():
            if not _same_calls(ours.get(name), theirs.get(name)):
                return f"{mine.step.name} leaves other calls in its graph {name}"
    return ""


def _sites(run: PassRun) -> list[tuple[str, str]]:
    return [(site.region, site.path) for site in run.sites]


def _same_calls(mine: Region | None, other: Region | None) -> bool:
    """Whether two graphs have the same calls, in the same order where neither has side streams.

    Which calls run side by side depends on what each is thought to take; whether they may is
    checked in the artifact's own graphs.
    """
    if mine is None or other is None:
        return mine is other
    first, second = (
        [node.target for node in region.graph.nodes if node.target not in STREAM_OPS]
        for region in (mine, other)
    )
    if has_streams(mine.graph) or has_streams(other.graph):
        return Counter(first) == Counter(second)
    return first == second
