"""Near-misses: places where a pass began to match and did not, equal ones once."""

from dataclasses import dataclass

from dsa_compile.artifact.records import PassSummary
from dsa_compile.inspect.store import Stage, Store
from dsa_compile.ir.listing import Listing, Statement
from dsa_compile.ir.site import NearMiss


@dataclass(frozen=True)
class Miss:
    """Equal near-misses.

    Attributes:
        path: the module of the reference model.
        reason: why the pattern did not match.
        depth: nodes that did match.
        places: ``(region, node)`` of each.
        layers: the layers that run those regions.
        statement: the node's line before the pass, of the first place; None if the node was made
            within the pass, or without records.
    """

    path: str
    reason: str
    depth: int
    places: tuple[tuple[str, str], ...]
    layers: tuple[int, ...]
    statement: Statement | None


def misses_of(store: Store, number: int) -> list[Miss]:
    """The near-misses of a pass, the deepest first; without records too.

    Args:
        store: the artifact.
        number: of the pass, from 1.
    """
    summary: PassSummary = store.manifest.passes[number - 1]
    stage = store.stages[number] if store.has_records else None
    groups: dict[tuple[str, str, int], list[NearMiss]] = {}
    for miss in summary.near_misses:
        groups.setdefault((miss.path, miss.reason, miss.depth), []).append(miss)
    found = [
        Miss(
            path,
            reason,
            depth,
            tuple(dict.fromkeys((miss.region, miss.node) for miss in same)),
            tuple(sorted({n for miss in same for n in store.layers_of(miss.region)})),
            _statement(stage, same[0]),
        )
        for (path, reason, depth), same in groups.items()
    ]
    return sorted(found, key=lambda miss: -miss.depth)


def _statement(stage: Stage | None, miss: NearMiss) -> Statement | None:
    graph = None if stage is None else stage.before.get(miss.region)
    node = None if graph is None else graph.nodes.get(miss.node)
    return (
        None
        if graph is None or node is None or not node.is_call
        else Listing(graph).statement(node)
    )
