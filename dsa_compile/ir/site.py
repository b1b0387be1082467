"""One rewrite of a pass, or one that failed, as data: what is kept and an artifact records."""

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


@dataclass(frozen=True)
class NearMiss:
    """Near miss: a site that began to match, and why it did not; ``depth`` counts matched nodes.

    ``region`` is the graph it is in, empty where that is not known.
    """

    path: str
    node: str
    reason: str
    depth: int
    region: str = ""

    def __str__(self) -> str:
        where = f"{self.path}: " if self.path else ""
        return f"{where}node {self.node}: {self.reason}"
