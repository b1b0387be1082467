"""Patterns that several passes use."""

from torch import fx

from dsa_compile.ir.calls import EMBED, HEAD
from dsa_compile.ir.match import Node
from dsa_compile.ir.region import Region, Role

# How aten spells "to the end" in slices.
END = 2**63 - 1


def value_named(name: str) -> Node:
    """Pattern of the region's input value of that name and of nothing else."""

    def reason(node: fx.Node) -> str | None:
        if node.meta.get("role") == Role.VALUE and node.meta.get("key") == name:
            return None
        return f"is {node.name}, not the input {name}"

    return Node(name, reason)


def each_layer(region: Region, count: int) -> int:
    """``count`` sites in every layer, none in prologue and head."""
    return 0 if region.kind in (EMBED, HEAD) else count
