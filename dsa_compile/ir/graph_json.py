"""Regions as JSON, and back over a whitelist.

Any region can be written: passes record what they saw at every level. Only a region whose calls are
all in :func:`~dsa_compile.ir.kernel_ops.allowed_targets` can be read back, and reading trusts
nothing: names, references, arguments and op signatures are all checked, because a graph file may
have been edited and the names in it end up in generated Python.
:mod:`dsa_compile.ir.graph` has the form. Of a node's notes, ``path`` is the module of the reference
model; ``origin`` the pass that made it; ``source`` file and line of the reference model, as
exported; ``was``, in a finished graph, the name that it had while passes ran; ``keywords`` names
the last arguments, those that are written by keyword.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from dsa_compile.ir.argument_json import DTYPES, ArgumentError, decode, encode
from dsa_compile.ir.graph import NOTES, BadNodeError, Graph, Node, graph_from_json, is_text
from dsa_compile.ir.kernel_ops import SchemaMismatchError, Yield, allowed_targets, check_call
from dsa_compile.ir.keywords import keywords
from dsa_compile.ir.region import Region, Role
from dsa_compile.ir.tensor_info import Info, ScalarInfo, TensorInfo, describe


def target_name(target: Callable[..., Any] | str) -> str:
    """The full name of what a node calls: ``"dsa.rms_norm.default"``, ``"operator.mul"``."""
    if isinstance(target, str):
        return target
    if isinstance(target, torch._ops.OpOverload | torch._ops.HigherOrderOperator):
        return str(target)
    # functions of `operator` are written in C and say they come from `_operator`
    module = "operator" if target.__module__ == "_operator" else target.__module__
    return f"{module}.{target.__qualname__}"


def region_to_json(region: Region) -> dict[str, Any]:
    """The JSON form of a region; see :func:`graph_of`."""
    return graph_of(region).to_json()


def graph_of(region: Region) -> Graph:
    """A region as plain data.

    Raises:
        TypeError: an argument or a value with no JSON form; names the region and the node.
    """
    nodes = {}
    for node in region.graph.nodes:
        try:
            nodes[node.name] = _node_of(node)
        except TypeError as error:
            raise TypeError(f"region {region.name}, node {node.name}: {error}") from error
    return Graph(region.name, region.outputs, nodes)


def _node_of(node: fx.Node) -> Node:
    info = None if node.op == "output" else describe(node.meta.get("val"))
    texts = {field: str(node.meta[field]) for field in NOTES if node.meta.get(field)}
    if node.op == "placeholder":
        texts |= {field: str(node.meta[field]) for field in ("role", "key") if field in node.meta}
    elif node.op != "output":
        texts |= {"target": target_name(node.target), "keywords": ", ".join(keywords(node))}
    kwargs = {name: encode(value) for name, value in node.kwargs.items()}
    args, val = tuple(map(encode, node.args)), _info_to_json(info)
    return Node(node.name, node.op, args=args, kwargs=kwargs, val=val, **texts)


def _info_to_json(info: Info) -> Any:
    if isinstance(info, TensorInfo):
        return {"dtype": str(info.dtype).removeprefix("torch."), "shape": list(info.shape)}
    if isinstance(info, ScalarInfo):
        return {"scalar": info.expression}
    if info is None:
        return None
    return [_info_to_json(item) for item in info]


def region_from_json(data: Any) -> Region:
    """Rebuild a region; each node's ``meta["val"]`` becomes a TensorInfo (or a tuple of them).

    Raises:
        ArtifactError: anything but what :func:`region_to_json` writes for a graph of allowed calls;
            names the graph and the node.
    """
    record = graph_from_json(data)
    reader = _Reader()
    for number, node in enumerate(record.nodes.values()):
        try:
            reader.add(node)
        except (BadNodeError, ArgumentError, SchemaMismatchError) as error:
            bad = BadNodeError(str(error))
            raise bad.of(f"graph {record.name}", {"name": node.name}, number) from None
    reader.graph.lint()
    return Region(record.name, reader.graph, record.outputs)


class _Reader:
    """Builds one graph node by node, checking each call against the nodes before it."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.nodes: dict[str, fx.Node] = {}
        self.yields: dict[fx.Node, Yield] = {}

    def add(self, record: Node) -> None:
        args = tuple(decode(value, self.nodes) for value in record.args)
        if record.op == "output":
            if any(self.yields[item] != "Tensor" for item in args[0]):
                raise BadNodeError("must return one tuple of tensors")
            self.graph.output(args[0])
            return
        node = self._placeholder(record) if record.op == "placeholder" else self._call(record, args)
        if node.name != record.name:
            raise BadNodeError("its name is reserved")
        node.meta |= {field: text for field in NOTES if (text := getattr(record, field))}
        if record.val is not None:
            node.meta["val"] = _info_from_json(record.val)
        self.nodes[node.name] = node

    def _placeholder(self, record: Node) -> fx.Node:
        if record.role not in list(Role):
            raise BadNodeError(f"role {record.role or None!r} is not one of {', '.join(Role)}")
        if not record.key:
            raise BadNodeError("its key is not a short line of text")
        node = self.graph.placeholder(record.name)
        node.meta |= {"role": Role(record.role), "key": record.key}
        self.yields[node] = "Tensor"
        return node

    def _call(self, record: Node, args: tuple[Any, ...]) -> fx.Node:
        target = allowed_targets().get(record.target)
        if target is None:
            raise BadNodeError(f"{record.target!r:.80} is not an op that artifacts may use")
        kwargs = {key: decode(value, self.nodes) for key, value in record.kwargs.items()}
        try:
            yields = check_call(target, args, kwargs, self.yields)
        except SchemaMismatchError as error:
            raise SchemaMismatchError(f"{record.target} {error}") from None
        node = self.graph.create_node("call_function", target, args, kwargs, record.name)
        self.yields[node] = yields
        return node


def _info_from_json(data: Any) -> Info:
    if data is None:
        return None
    if isinstance(data, list):
        # one level: an op yields a tensor, a number, or a flat sequence of these
        if any(isinstance(item, list) for item in data):
            raise BadNodeError("its val is nested")
        return tuple(_info_from_json(item) for item in data)
    if isinstance(data, dict) and data.keys() == {"scalar"} and _is_symbol(data["scalar"]):
        return ScalarInfo(data["scalar"])
    if isinstance(data, dict) and data.keys() == {"dtype", "shape"}:
        dtype, shape = data["dtype"], data["shape"]
        dtype_known = isinstance(dtype, str) and dtype in DTYPES
        if dtype_known and isinstance(shape, list) and all(map(_is_size, shape)):
            return TensorInfo(DTYPES[dtype], tuple(shape))
    raise BadNodeError("its val is not a dtype with a shape")


def _is_size(size: Any) -> bool:
    return _is_symbol(size) or (type(size) is int and size >= 0)


def _is_symbol(text: Any) -> bool:
    return bool(text) and is_text(text)
