"""A hazard: one reason why a region could compute wrong values on a GPU."""

from dataclasses import dataclass
from enum import StrEnum

from torch import fx


class HazardKind(StrEnum):
    """Kind of a hazard."""

    RACE = "race"  # two streams use the same memory, one of them writes, and nothing orders them
    FREED_EARLY = "freed early"  # memory is given out again while another stream uses it
    NOT_FORKED = "not forked"  # a side stream does not wait for what came before the region
    NOT_JOINED = "not joined"  # the region ends before a side stream has
    NOT_RECORDED = "not recorded"  # a wait for an event that was not recorded before
    NO_STREAM = "no such stream"
    RESULT = "result off stream 0"  # memory of a side stream leaves the region
    COLLECTIVE = "collective off stream 0"
    HOST_SYNC = "host sync"  # the host waits for the device
    FROZEN = "frozen by capture"  # a captured graph would repeat what the host said once


@dataclass(frozen=True)
class Hazard:
    """One thing that could go wrong.

    Attributes:
        kind: what.
        region: where.
        first: name of the node that comes first.
        second: name of the node that it goes wrong with.
        problem: a sentence.
        remedy: what to add or change.
    """

    kind: HazardKind
    region: str
    first: str
    second: str
    problem: str
    remedy: str

    @classmethod
    def between(
        cls,
        kind: HazardKind,
        region: str,
        nodes: tuple[fx.Node, fx.Node],
        problem: str,
        remedy: str,
    ) -> "Hazard":
        """Hazard with the names of two nodes."""
        return cls(kind, region, nodes[0].name, nodes[1].name, problem, remedy)

    def __str__(self) -> str:
        return f"{self.region}: {self.kind}: {self.problem}; {self.remedy}"
