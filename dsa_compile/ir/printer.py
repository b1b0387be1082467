"""A region as Python: :mod:`dsa_compile.ir.listing` prints it, with what only its calls tell."""

from dataclasses import replace

import torch
from torch import fx

from dsa_compile.ir.graph import Graph, Node
from dsa_compile.ir.graph_json import graph_of
from dsa_compile.ir.listing import Listing
from dsa_compile.ir.region import Region
from dsa_compile.ir.storage import Memory
from dsa_compile.ir.streams import Timeline, has_streams


def region_to_python(region: Region) -> str:
    """The region as the text of one Python function, ending in a newline.

    Raises:
        TypeError: a node other than a placeholder, a call of a function, or the output; or an
            argument that graphs do not hold.
    """
    graph = graph_of(region)
    nodes = {}
    for node in region.graph.nodes:
        if node.op not in ("placeholder", "call_function", "output"):
            raise TypeError(f"region {region.name}, node {node.name}: a region has no {node.op}")
        nodes[node.name] = _spelt_out(graph.nodes[node.name], node)
    listing = Listing(Graph(graph.name, graph.outputs, nodes), notes=_waits(region.graph))
    return "\n".join(listing.function()) + "\n"


def _spelt_out(node: Node, call: fx.Node) -> Node:
    """The node with each None by keyword that its op does not assume; listings leave Nones out."""
    if None not in call.kwargs.values() or not isinstance(call.target, torch._ops.OpOverload):
        return node
    given = [name for name, value in call.kwargs.items() if value is None]
    assumed = {
        argument.name
        for argument in call.target._schema.arguments
        if argument.has_default_value() and argument.default_value is None
    }
    missing = [name for name in given if name not in assumed]
    return replace(node, kwargs={**node.kwargs, **{name: {"sym": "None"} for name in missing}})


def _waits(graph: fx.Graph) -> dict[str, str]:
    """Text that names what each wait waits for."""
    found = {}
    waits = Timeline(graph, Memory(graph).uses).waits if has_streams(graph) else {}
    for wait, recorded in waits.items():
        if recorded is not None:
            call = "the inputs" if recorded.after is None else recorded.after.name
            found[wait.name] = f"stream {recorded.stream}: {call}"
    return found
