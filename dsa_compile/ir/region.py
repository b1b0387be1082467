"""A region: one fx.Graph that is a pure function of its placeholders.

A compiled model is a handful of regions (``embed``, one per layer kind, ``head``, each perhaps in a
long and a short variant); plans say with which weights and caches each is called.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from torch import fx


class Role(StrEnum):
    """Role of a placeholder: ``meta["role"]``; ``meta["key"]`` is its name in that role."""

    VALUE = "value"  # handed on from the region before
    BATCH = "batch"  # describes the step: token ids, positions, block tables, …
    CACHE = "cache"  # paged, per layer, written in place
    WEIGHT = "weight"  # a parameter; its key may hold template variables of calls


@dataclass
class Region:
    """One graph and the names of what it returns.

    Attributes:
        name: ``kind`` or ``kind.variant``, for example ``"moe"`` or ``"moe.short"``.
        graph: placeholders carry ``meta["role"]`` and ``meta["key"]``; the output node returns a
            tuple of nodes.
        outputs: a name for each entry of the output tuple; they replace the values of those names
            for the next region.
    """

    name: str
    graph: fx.Graph
    outputs: tuple[str, ...]

    @property
    def kind(self) -> str:
        """The layer kind, such as ``"moe"`` of ``"moe.short"``."""
        return self.name.partition(".")[0]

    @property
    def variant(self) -> str | None:
        """Such as ``"long"`` or ``"prompt"``; None where the region was not split."""
        return self.name.partition(".")[2] or None

    def inputs(self) -> list[fx.Node]:
        """The placeholders, in order."""
        return [node for node in self.graph.nodes if node.op == "placeholder"]

    def inputs_of(self, role: Role) -> list[fx.Node]:
        """The placeholders of one role, in order; those without a role belong to none."""
        return [node for node in self.inputs() if node.meta.get("role") == role]

    def result(self, name: str) -> fx.Node:
        """The node returned under a name of ``outputs``."""
        results = self.graph.output_node().args[0]
        assert isinstance(results, tuple)
        node = results[self.outputs.index(name)]
        assert isinstance(node, fx.Node)
        return node

    def copy(self, name: str) -> "Region":
        """A region of that name whose graph is a copy: new nodes, same names.

        Each node gets its own ``meta`` dict; the values in it (FakeTensors, paths) are shared.
        """
        graph = fx.Graph()
        renamed: dict[fx.Node, fx.Node] = {}
        result: Any = graph.graph_copy(self.graph, renamed)
        old_output = self.graph.output_node()
        # graph_copy stops before the output node: it belongs to whoever assembles the new graph
        output = graph.output(result)
        output.meta = dict(old_output.meta)
        for old, new in renamed.items():
            new.meta = dict(old.meta)
        return Region(name, graph, self.outputs)

    def fork(self) -> "Region":
        """A copy whose next nodes are named as those of this region would be."""
        made = self.copy(self.name)
        theirs, mine = made.graph._graph_namespace, self.graph._graph_namespace
        theirs._used_names |= mine._used_names  # also those of nodes that are gone
        theirs._base_count.update(mine._base_count)
        return made

    def node_count(self) -> int:
        """Number of computing nodes of the graph, without placeholders and output."""
        return sum(node.op not in ("placeholder", "output") for node in self.graph.nodes)


def open_values(regions: Iterable[Region]) -> dict[str, fx.Node]:
    """Values that regions, called in this order, take and none before them has returned.

    Returns:
        By name, the placeholder that takes it first.
    """
    found: dict[str, fx.Node] = {}
    made: set[str] = set()
    for region in regions:
        for node in region.inputs_of(Role.VALUE):
            if node.meta["key"] not in made:
                found.setdefault(node.meta["key"], node)
        made.update(region.outputs)
    return found
