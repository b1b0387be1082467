"""The record that a pass leaves: what a program keeps of its history."""

from dataclasses import dataclass, field
from enum import Enum
from html import escape
from typing import Any

from dsa_compile.common.notebook import diff_html
from dsa_compile.ir.journal import Journal
from dsa_compile.ir.site import NearMiss


class Numerics(Enum):
    """Whether a rewrite may change results."""

    BITWISE = "bitwise"  # the same bits, those of zeros and NaNs too
    TOLERANCE = "tolerance"  # the same mathematics in another order or precision


@dataclass
class PassRecord:
    """Record of one pass.

    ``rewrites`` and ``expected`` count sites over all layers; ``by_region`` counts them once a
    graph, ``left`` those that are better left as they are, of which nothing is expected, and
    ``journal`` has them one by one. ``before`` and ``after`` hold readable Python of the regions
    that changed, ``graphs`` the JSON form of those after it; all three are empty where the
    configuration asks for no records. ``remarks`` are lines to read: what the pass went by.
    ``about`` is :attr:`Pass.about`.
    """

    name: str
    numerics: Numerics
    about: str = ""
    rewrites: int = 0
    expected: int | None = None
    by_region: dict[str, int] = field(default_factory=dict)
    left: dict[str, int] = field(default_factory=dict)
    nodes_before: int = 0
    nodes_after: int = 0
    seconds: float = 0.0
    near_misses: list[NearMiss] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    journal: Journal = field(default_factory=Journal)
    before: dict[str, str] = field(default_factory=dict)
    after: dict[str, str] = field(default_factory=dict)
    graphs: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __repr__(self) -> str:
        promised = "" if self.expected is None else f" of {self.expected}"
        nodes = f"{self.nodes_before} → {self.nodes_after} nodes"
        took = f"{1e3 * self.seconds:.0f} ms"
        return f"<PassRecord {self.name}: {self.rewrites}{promised} rewrites, {nodes}, {took}>"

    def _repr_html_(self) -> str:
        purpose = self.about.partition("\n")[0]
        changed = (
            diff_html(name, self.before.get(name, ""), text) for name, text in self.after.items()
        )
        return f"<b>{escape(repr(self))}</b><div>{escape(purpose)}</div>" + "".join(changed)
