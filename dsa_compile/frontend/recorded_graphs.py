"""Read exported graphs back from the records of an artifact, typed like those of a fresh export.

Tracing a layer takes seconds; reading its graph takes a fraction of that and gives the same nodes,
names, notes and types. Values are computed from the calls, not taken from the file, and must be
those that the file states.
"""

import operator
from typing import Any

import torch
from torch import fx
from transformers.integrations import moe as _moe  # registers the ops that experts are exported to

from dsa_compile.errors import ArtifactError
from dsa_compile.ir.argument_json import ArgumentError, decode
from dsa_compile.ir.dims import FakeWorld
from dsa_compile.ir.dtype_names import DTYPE_NAMES
from dsa_compile.ir.graph import graph_from_json
from dsa_compile.ir.graph_json import region_to_json
from dsa_compile.ir.region import Region, Role

assert _moe
_NAMESPACES = ("aten", "transformers")  # of ops that torch.export leaves in these graphs
_PRIVATE = ("_grouped_mm",)  # of aten's private ops, those that are left there
_OPERATORS = ("add", "floordiv", "getitem", "mod", "mul", "neg", "pow", "sub", "truediv")
_SYMBOLIC = ("sym_float", "sym_int", "sym_max", "sym_min")


def read_graph(data: Any, world: FakeWorld) -> Region:
    """A region as exported, from the JSON that :func:`~dsa_compile.ir.graph_json.region_to_json`
    wrote of it.

    Args:
        data: of one region.
        world: that the graph is typed in.

    Raises:
        ArtifactError: not such a graph, or its values are not those that it states.
    """
    try:
        region = _read(data, world)
        same = region_to_json(region) == data
    except Exception as error:  # whatever a damaged graph leads to
        raise ArtifactError(f"exported graph: {type(error).__name__}: {error}; recompile") from None
    if not same:
        raise ArtifactError(f"exported graph {region.name}: not what it states; recompile")
    return region


def _read(data: Any, world: FakeWorld) -> Region:
    graph = fx.Graph()
    nodes: dict[str, fx.Node] = {}
    recorded = graph_from_json(data)
    for entry in recorded.nodes.values():
        args = tuple(decode(value, nodes) for value in entry.args)
        match entry.op:
            case "output":
                graph.output(*args)
                continue
            case "placeholder":
                node = graph.placeholder(entry.name)
                kind, shape = entry.val["dtype"], entry.val["shape"]
                if kind not in DTYPE_NAMES:
                    raise ArgumentError(f"no dtype {kind!r:.80}")
                value = world.tensor(shape, getattr(torch, kind))
                meta = {"role": Role(entry.role), "key": entry.key, "path": ""}
            case _:
                kwargs = {key: decode(v, nodes) for key, v in entry.kwargs.items()}
                target = _target(entry.target)
                node = graph.create_node("call_function", target, args, kwargs, entry.name)
                value = world.evaluate(target, args, kwargs)
                meta = {"path": entry.path, "source": entry.source}
        node.meta = {**meta, "origin": "export", "val": value}
        nodes[node.name] = node
    graph.lint()
    return Region(recorded.name, graph, recorded.outputs)


def _target(name: str) -> Any:
    """Target of a node, which may read and write nothing but tensors."""
    home, _, rest = name.partition(".")
    if home == "operator" and rest in _OPERATORS:
        return getattr(operator, rest)
    if home == "torch" and rest in _SYMBOLIC:
        return getattr(torch, rest)
    packet, _, overload = rest.partition(".")
    private = "_" == packet[:1] != packet[1:2] and packet not in _PRIVATE
    if home not in _NAMESPACES or private:
        raise ArgumentError(f"{name!r:.80} is not an op of exported graphs")
    op = getattr(getattr(getattr(torch.ops, home), packet), overload)
    types = [str(argument.real_type) for argument in op._schema.arguments]
    if "str" in types and not any("Tensor" in kind for kind in types):
        raise ArgumentError(f"{name!r:.80} is not an op of exported graphs")  # it reads a file
    return op
