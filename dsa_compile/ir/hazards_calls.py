"""Hazards of single calls: what must not run beside others, wait for the device, or be captured."""

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from dsa_compile.ir.hazard import Hazard, HazardKind
from dsa_compile.ir.region import Region
from dsa_compile.ir.storage import arguments
from dsa_compile.ir.streams import MAIN
from dsa_compile.ops import ON_STREAM

aten = torch.ops.aten

# Numbers that a kernel would get from the host at every call, and a captured graph for ever.
_FROM_HOST = frozenset({aten.lift_fresh_copy.default, aten.scalar_tensor.default, aten.to.device})
_NUMBERS = frozenset({"number", "int", "float", "bool", "SymInt", "Scalar"})
_SYNCS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


def call_hazards(region: Region, collectives: Collection[OpOverload]) -> Iterator[Hazard]:
    """Hazards of one region, in the order of its calls; lazily.

    Args:
        region: of the KERNEL level.
        collectives: ops held to stream 0.
    """
    stream = MAIN
    chosen: fx.Node | None = None
    for node in region.graph.nodes:
        if node.target is ON_STREAM:
            stream, chosen = node.args[0], node
        elif isinstance(node.target, OpOverload):
            if chosen is not None and stream != MAIN and node.target in collectives:
                yield Hazard.between(
                    HazardKind.COLLECTIVE,
                    region.name,
                    (chosen, node),
                    f"{node.name} is a collective on stream {stream}, which {chosen.name} chose",
                    f"add on_stream({MAIN}) before {node.name}",
                )
            yield from _host_work(region.name, node, node.target)


def _host_work(region: str, node: fx.Node, op: OpOverload) -> Iterator[Hazard]:
    source = next(iter(node.all_input_nodes), node)
    if _SYNCS & set(op.tags):
        yield Hazard.between(
            HazardKind.HOST_SYNC,
            region,
            (source, node),
            f"{node.name} ({op}) makes the host wait for {source.name}",
            "keep the value on the device",
        )
    if torch.Tag.nondeterministic_seeded in op.tags:
        yield Hazard.between(
            HazardKind.FROZEN,
            region,
            (source, node),
            f"{node.name} ({op}) takes its seed from the host",
            "give the random numbers to the region as an input",
        )
    if op in _FROM_HOST:
        yield Hazard.between(
            HazardKind.FROZEN,
            region,
            (source, node),
            f"{node.name} ({op}) reads memory of the host",
            "give the value to the region as an input on the device",
        )
    for argument, value in arguments(node, op):
        for number in _numbers(value):
            yield Hazard.between(
                HazardKind.FROZEN,
                region,
                (number, node),
                f"{node.name} takes the number {number.name} as {argument.name} from the host",
                "give it as a tensor, or as a constant of the graph",
            )


def _numbers(value: Any) -> list[fx.Node]:
    """Nodes in an argument that yield a number and not a tensor."""
    found: list[fx.Node] = []
    fx.node.map_arg(value, found.append)
    return [node for node in found if _yields_number(node)]


def _yields_number(node: fx.Node) -> bool:
    if not isinstance(node.target, OpOverload):
        return False
    returns = node.target._schema.returns
    return len(returns) == 1 and str(returns[0].type) in _NUMBERS
