"""Patterns and counts that several passes use."""

import torch
from torch import fx

from dsa_compile.ir.match import Node, argument, calls
from dsa_compile.ir.program import Place, Program
from dsa_compile.ir.region import Region, Role

# The value that hands a selection on, to layers without an indexer: int32, positions before caches
# are paged and their rows from then on.
SELECTED = "selected"
# How aten spells "to the end" in slices.
END = 2**63 - 1


def value_named(name: str) -> Node:
    """Pattern of the region's input value of that name and of nothing else."""

    def reason(node: fx.Node) -> str | None:
        if node.meta.get("role") == Role.VALUE and node.meta.get("key") == name:
            return None
        return f"is {node.name}, not the input {name}"

    return Node(name, reason)


def each_layer(program: Program, region: Region, count: int = 1) -> int:
    """``count`` sites in every layer, none in prologue and head."""
    return count if program.layer_kind(region) else 0


def each_indexer(program: Program, region: Region, count: int = 1) -> int:
    """``count`` sites in every layer that has an indexer of its own."""
    kind = program.layer_kind(region)
    return count if kind and kind.indexer else 0


def each_latent(program: Program, region: Region, count: int = 1) -> int:
    """``count`` sites in every layer that makes latents."""
    kind = program.layer_kind(region)
    return count if kind and kind.latents != "borrowed" else 0


def each_rotation(program: Program, region: Region, count: int = 1) -> int:
    """``count`` sites in every layer that rotates queries and keys."""
    kind = program.layer_kind(region)
    return count if kind and kind.rope else 0


def each_experts(program: Program, region: Region, count: int = 1) -> int:
    """``count`` sites in every layer with routed experts."""
    kind = program.layer_kind(region)
    return count if kind and kind.mlp == "experts" else 0


def in_place(program: Program, region: Region, place: Place, count: int = 1) -> int:
    """``count`` sites in the regions that stand there."""
    return count if program.place(region) is place else 0


def each_draft(program: Program, region: Region, count: int = 1) -> int:
    """``count`` sites in the prologues that take states as well as tokens."""
    takes = bool(region.inputs_of(Role.VALUE))
    return in_place(program, region, Place.PROLOGUE, count) if takes else 0


def gated_mlps(program: Program, region: Region) -> int:
    """The dense MLP or the shared expert of a layer; none where that is one of the experts."""
    routers = calls(region.graph, torch.ops.dsa.router.default)
    merged = any(argument(router, "shared_experts") for router in routers)
    return each_layer(program, region, 0 if merged else 1)
