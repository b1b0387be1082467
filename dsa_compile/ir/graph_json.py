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

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from dsa_compile.errors import ArtifactError
from dsa_compile.ir.argument_json import DTYPES, ArgumentError, decode, encode
from dsa_compile.ir.graph import NOTES, Graph, Node
from dsa_compile.ir.kernel_ops import SchemaMismatchError, Yield, allowed_targets, check_call
from dsa_compile.ir.keywords import keywords
from dsa_compile.ir.region import Region, Role
from dsa_compile.ir.tensor_info import Info, ScalarInfo, TensorInfo, describe

_KEYWORDS = "keywords"  # a note too, but made of the op's schema
_MAX_TEXT = 1000
_MAX_NAME = 200
_MAX_NODES = 20_000  # a layer of the released model has about 100


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
    name, outputs, nodes = _region_fields(data)
    reader = _Reader(name)
    for entry in nodes:
        reader.read(entry)
    graph = reader.finish(len(outputs))
    return Region(name, graph, outputs)


def _region_fields(data: Any) -> tuple[str, tuple[str, ...], list[Any]]:
    if not isinstance(data, dict) or data.keys() != {"name", "outputs", "nodes"}:
        raise ArtifactError("graph: expected an object with name, outputs and nodes; recompile")
    name, outputs, nodes = data["name"], data["outputs"], data["nodes"]
    if not _is_text(name):
        raise ArtifactError("graph: its name is not a short line of text; recompile")
    if not isinstance(outputs, list) or not all(map(_is_text, outputs)):
        raise ArtifactError(f"graph {name}: outputs must be a list of names; recompile")
    if len(set(outputs)) != len(outputs):
        raise ArtifactError(f"graph {name}: an output is named twice; recompile")
    if not isinstance(nodes, list) or len(nodes) > _MAX_NODES:
        raise ArtifactError(f"graph {name}: nodes must be a list of up to {_MAX_NODES}; recompile")
    return name, tuple(outputs), nodes


def _is_text(value: Any) -> bool:
    # Printable also means one line: these strings appear in comments of printed programs.
    return isinstance(value, str) and 0 < len(value) <= _MAX_TEXT and value.isprintable()


class _Reader:
    """Builds one graph node by node, checking each against the nodes before it."""

    def __init__(self, region: str) -> None:
        self.region = region
        self.graph = fx.Graph()
        self.nodes: dict[str, fx.Node] = {}
        self.yields: dict[fx.Node, Yield] = {}
        self.result: tuple[Any, ...] | None = None

    def read(self, entry: Any) -> None:
        name = entry.get("name") if isinstance(entry, dict) else None
        label = name if _is_text(name) else f"#{len(self.nodes)}"
        try:
            self._read(entry, name)
        except (_BadNodeError, ArgumentError, SchemaMismatchError) as error:
            raise ArtifactError(
                f"graph {self.region}, node {label}: {error}; the file was edited or damaged, "
                "recompile"
            ) from None

    def finish(self, outputs: int) -> fx.Graph:
        if self.result is None or len(self.result) != outputs:
            found = "no output" if self.result is None else f"{len(self.result)} results"
            raise ArtifactError(
                f"graph {self.region}: {found} for {outputs} output names; recompile"
            )
        self.graph.lint()
        return self.graph

    def _read(self, entry: Any, name: Any) -> None:
        if self.result is not None:
            raise _BadNodeError("comes after the output")
        if not isinstance(entry, dict):
            raise _BadNodeError("is not an object")
        op = entry.get("op")
        if not isinstance(op, str) or op not in _FIELDS:
            raise _BadNodeError(f"op {op!r:.80} is not one of {', '.join(_FIELDS)}")
        unknown = entry.keys() - _FIELDS[op]
        if unknown:
            raise _BadNodeError(f"unknown field {min(unknown)!r:.80}")
        if not isinstance(name, str) or not name.isidentifier() or len(name) > _MAX_NAME:
            raise _BadNodeError("its name is not an identifier")
        if name in self.nodes:
            raise _BadNodeError("a node of that name exists already")
        if op == "output":
            self.result = self._output(entry)
            return
        node = self._placeholder(entry, name) if op == "placeholder" else self._call(entry, name)
        if node.name != name:
            raise _BadNodeError("its name is reserved")
        node.meta |= _notes(entry)
        self.nodes[name] = node

    def _placeholder(self, entry: Mapping[str, Any], name: str) -> fx.Node:
        role, key = entry.get("role"), entry.get("key")
        if role not in list(Role):
            raise _BadNodeError(f"role {role!r:.80} is not one of {', '.join(Role)}")
        if not _is_text(key):
            raise _BadNodeError("its key is not a short line of text")
        node = self.graph.placeholder(name)
        node.meta |= {"role": Role(role), "key": key}
        self.yields[node] = "Tensor"
        return node

    def _call(self, entry: Mapping[str, Any], name: str) -> fx.Node:
        target = entry.get("target")
        allowed = allowed_targets()
        if not isinstance(target, str) or target not in allowed:
            raise _BadNodeError(f"{target!r:.80} is not an op that artifacts may use")
        args, kwargs = entry.get("args", []), entry.get("kwargs", {})
        if not isinstance(args, list) or not isinstance(kwargs, dict):
            raise _BadNodeError("args must be a list and kwargs an object")
        positional = tuple(decode(value, self.nodes) for value in args)
        named = {key: decode(value, self.nodes) for key, value in kwargs.items()}
        try:
            yields = check_call(allowed[target], positional, named, self.yields)
        except SchemaMismatchError as error:
            raise SchemaMismatchError(f"{target} {error}") from None
        node = self.graph.create_node("call_function", allowed[target], positional, named, name)
        self.yields[node] = yields
        return node

    def _output(self, entry: Mapping[str, Any]) -> tuple[Any, ...]:
        args = entry.get("args")
        result = decode(args[0], self.nodes) if isinstance(args, list) and len(args) == 1 else None
        if not isinstance(result, tuple) or not all(
            isinstance(item, fx.Node) and self.yields[item] == "Tensor" for item in result
        ):
            raise _BadNodeError("must return one tuple of tensors")
        self.graph.output(result)
        return result


class _BadNodeError(Exception):
    """Error in one node of a graph file."""


_COMMON = {"op", "name", "val", *NOTES}
_FIELDS = {
    "placeholder": _COMMON | {"role", "key"},
    "call_function": _COMMON | {"target", "args", "kwargs", _KEYWORDS},
    "output": _COMMON - {"val"} | {"args"},
}


def _notes(entry: Mapping[str, Any]) -> dict[str, Any]:
    for field in (*NOTES, _KEYWORDS):
        if field in entry and not _is_text(entry[field]):
            raise _BadNodeError(f"its {field} is not a short line of text")
    meta: dict[str, Any] = {field: entry[field] for field in NOTES if field in entry}
    if "val" in entry:
        meta["val"] = _info_from_json(entry["val"])
    return meta


def _info_from_json(data: Any) -> Info:
    if data is None:
        return None
    if isinstance(data, list):
        # one level: an op yields a tensor, a number, or a flat sequence of these
        if any(isinstance(item, list) for item in data):
            raise _BadNodeError("its val is nested")
        return tuple(_info_from_json(item) for item in data)
    if isinstance(data, dict) and data.keys() == {"scalar"} and _is_text(data["scalar"]):
        return ScalarInfo(data["scalar"])
    if isinstance(data, dict) and data.keys() == {"dtype", "shape"}:
        dtype, shape = data["dtype"], data["shape"]
        dtype_known = isinstance(dtype, str) and dtype in DTYPES
        if dtype_known and isinstance(shape, list) and all(map(_is_size, shape)):
            return TensorInfo(DTYPES[dtype], tuple(shape))
    raise _BadNodeError("its val is not a dtype with a shape")


def _is_size(size: Any) -> bool:
    return _is_text(size) or (type(size) is int and size >= 0)
