"""One rewrite of a pass, as data: what a journal keeps and an artifact records."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Site:
    """One rewrite.

    Attributes:
        number: within the pass, from 1.
        region: the graph; empty for a rewrite of several graphs at once.
        path: the module of the reference model that the replaced nodes stand for.
        removed: names of nodes that this rewrite left without users, of the graph before the pass
            or made by an earlier site of it.
        made: names of the nodes that stand in their place.
    """

    number: int
    region: str
    path: str
    removed: tuple[str, ...] = ()
    made: tuple[str, ...] = ()
