"""The passes of an artifact, a row each."""

from dataclasses import dataclass

from dsa_compile.inspecting.store import Store


@dataclass(frozen=True)
class PassRow:
    """What one pass did.

    Attributes:
        number: place in the pipeline, from 1.
        name: of the pass.
        numerics: ``bitwise`` or ``tolerance``.
        rewrites: over all layers.
        expected: what the pass promised, or None.
        by_region: rewrites once a graph.
        nodes_before: computing nodes of a step before the pass.
        nodes_after: and after it.
        seconds: it took.
        near_misses: places that almost matched.
        remarks: lines to read.
        recorded: whether it changed a graph and records were kept.
    """

    number: int
    name: str
    numerics: str
    rewrites: int
    expected: int | None
    by_region: dict[str, int]
    nodes_before: int
    nodes_after: int
    seconds: float
    near_misses: int
    remarks: tuple[str, ...]
    recorded: bool


def pass_rows(store: Store) -> list[PassRow]:
    """A row for every pass that ran, in order; needs no records."""
    return [
        PassRow(
            number=number,
            name=summary.name,
            numerics=summary.numerics,
            rewrites=summary.rewrites,
            expected=summary.expected,
            by_region=dict(summary.by_region),
            nodes_before=summary.nodes_before,
            nodes_after=summary.nodes_after,
            seconds=summary.seconds,
            near_misses=len(summary.near_misses),
            remarks=summary.remarks,
            recorded=summary.graphs is not None,
        )
        for number, summary in enumerate(store.manifest.passes, start=1)
    ]
