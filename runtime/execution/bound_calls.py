"""The calls of a plan with their kernels, weights and caches."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor, fx

from dsa_compile.artifact.manifest import Manifest
from dsa_compile.ir.execution import BoundCall
from dsa_compile.ir.plan import LONG, Call, Plan, region_name
from dsa_compile.ir.region import Region, Role
from dsa_compile.runtime.execution.executor import bind
from dsa_compile.runtime.execution.expert_counts import ExpertCounts
from dsa_compile.runtime.execution.streams import SideStreams
from dsa_compile.runtime.failures.blame import blamed
from dsa_compile.runtime.pages.kinds import Caches

Around = Callable[[fx.Node, Callable[..., Any]], Callable[..., Any]]
"""Makes the function of a node from another."""


def bound_calls(
    manifest: Manifest,
    regions: Mapping[str, Region],
    plan: Plan,
    weights: Mapping[str, Mapping[str, Tensor]],
    caches: Caches,
    wait: Callable[[], None] | None,
    counts: ExpertCounts | None = None,
    around: Around | None = None,
) -> dict[str, list[BoundCall]]:
    """Bind the calls of a plan, for each variant.

    Args:
        manifest: of the artifact.
        regions: its graphs, or others with the same inputs, by name.
        plan: whose calls.
        weights: for each call, by its name, the weights by key.
        caches: for each call that owns some, those by key.
        wait: called after every op, so that one that fails on the GPU is named; None for none.
        counts: of experts' tokens, which every call adds to; None to count nothing.
        around: makes the function of a node from the one that is bound to it; None to leave it.

    Returns:
        The calls in their order, by variant.

    Raises:
        ArtifactError: an op has no kernel here.
    """
    streams = SideStreams()

    def watching(node: fx.Node, function: Callable[..., Any]) -> Callable[..., Any]:
        made = function if around is None else around(node, function)
        return made if counts is None else counts.counting(node, made)

    functions = {
        name: bind(region, manifest.kernels, manifest.target, streams, wait, watching)
        for name, region in regions.items()
    }

    def bound(call: Call, variant: str) -> BoundCall:
        name = region_name(regions, call.kind, variant)
        own = {} if call.caches is None else caches.get(call.caches, {})
        made = BoundCall(
            regions[name],
            functions[name],
            {Role.WEIGHT: weights[call.name], Role.CACHE: own},
            partial(
                blamed,
                function=functions[name],
                region=regions[name],
                place="" if call.layer is None else f"layer {call.layer}",
                waited=wait is not None,
            ),
        )
        if counts is None or call.layer not in counts.layers:
            return made
        return made.within(counts.within(call.layer, regions[name]))

    return {
        variant: [bound(call, variant) for call in plan.calls]
        for variant in manifest.variants or (LONG,)
    }
