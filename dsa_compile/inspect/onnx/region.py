"""One recorded graph as an ONNX function."""

from collections.abc import Sequence
from typing import Any

import onnx
import torch
from onnx import helper

from dsa_compile.inspect.onnx.aten import Call, Value, convert
from dsa_compile.inspect.onnx.bodies import DOMAIN, OPSET
from dsa_compile.inspect.onnx.body import DTYPES, Body, tensor_type
from dsa_compile.inspect.onnx.schemas import VERSION, Signature, signatures
from dsa_compile.ir.graph import Graph, Node, references
from dsa_compile.ir.listing import Listing

_GETITEM = "operator.getitem"
_MARKERS = frozenset(f"dsa.{name}.default" for name in ("record_event", "wait_event", "keep_alive"))
_ON_STREAM = "dsa.on_stream.default"
_NOTES = ("path", "origin", "source", "was")


def region_function(region: Graph, domain: str, name: str) -> onnx.FunctionProto:
    """The function of a region: its placeholders in order are the inputs.

    Streams have no place in ONNX: a node says in its notes on which it runs, beside the path and
    the pass it comes from. The outputs are those of the region, then every cache it was given.

    Args:
        region: as it was recorded.
        domain: of the function.
        name: of the function.
    """
    return _Region(region).function(domain, name)


class _Region:
    def __init__(self, region: Graph) -> None:
        self.nodes = region.nodes.values()
        self.listing = Listing(region)
        self.body = Body()
        self.values: dict[str, Any] = {}  # of each node: a Value, or a list of them
        self.types: dict[str, Any] = {}
        self.caches: dict[str, str] = {}  # of each cache: what it is called after the last write
        self.entries = self._entries()

    def function(self, domain: str, name: str) -> onnx.FunctionProto:
        inputs, outputs, stream = [], [], 0
        for node in self.nodes:
            if node.op == "placeholder":
                inputs.append(node.name)
                self._define(node.name, node.name, node.val)
                if node.role == "cache":
                    self.caches[node.name] = node.name
            elif node.op == "output":
                outputs = self._results(node, inputs)
            elif node.target == _ON_STREAM:
                stream = node.args[0]
            elif node.target not in _MARKERS:
                self._call(node, stream)
        domains = {node.domain for node in self.body.nodes} | {""}
        imports = [helper.make_opsetid(d, VERSION if d else OPSET) for d in sorted(domains)]
        function = helper.make_function(domain, name, inputs, outputs, self.body.nodes, imports)
        made = {output for node in self.body.nodes for output in node.output}
        for value, val in self.types.items():
            if value in made and (kind := tensor_type(val)) is not None:
                function.value_info.append(helper.make_value_info(value, kind))
        return function

    def _entries(self) -> dict[tuple[str, int], str]:
        """Names for the results of ops with several: of the nodes that take them."""
        found: dict[tuple[str, int], str] = {}
        for node in self.nodes:
            if node.target == _GETITEM:
                source, index = node.args
                found.setdefault((source["n"], index), node.name)
        return found

    def _define(self, node: str, value: str, val: Any) -> Value:
        shaped = isinstance(val, dict)
        scalar = shaped and "scalar" in val
        dtype = "int64" if scalar else val["dtype"] if shaped else ""
        rank = 0 if scalar else len(val["shape"]) if shaped else None
        self.types[value] = val
        self.values[node] = made = Value(value, dtype, rank)
        return made

    def _call(self, node: Node, stream: int) -> None:
        if node.target == _GETITEM:
            source, index = node.args
            self.values[node.name] = self.values[source["n"]][index]
            return
        notes = {key: text for key in _NOTES if (text := getattr(node, key))}
        self.body.about(node.name, notes | ({"stream": str(stream)} if stream else {}))
        outputs = self._outputs(node)
        namespace, op, overload = _target(node.target)
        if namespace == DOMAIN:
            self._dsa(node, signatures()[op], outputs)
            return
        call = self._bound(node, outputs)
        if call is None or not convert(self.body, node.target, call):
            given = references([node.args, *node.kwargs.values()])
            inputs = [self.values[name].name for name in given]
            plain = op if overload in ("", "default") else f"{op}_{overload}"
            self.body.emit(
                plain, *inputs, out=outputs, domain=namespace, call=self.listing.expression(node)
            )

    def _outputs(self, node: Node) -> list[str]:
        """Names of a call's results, and their values under the node's name."""
        name, val = node.name, node.val
        if not isinstance(val, list):
            return [self._define(name, name, val).name] if val is not None else []
        names = [self.entries.get((name, i), f"{name}.{i}") for i in range(len(val))]
        self.values[name] = [self._define(n, n, v) for n, v in zip(names, val, strict=True)]
        return names

    def _dsa(self, node: Node, signature: Signature, outputs: list[str]) -> None:
        arguments = self._arguments(node, signature.overload)
        inputs: list[str] = []
        for name in signature.inputs:
            value = arguments[name]
            inputs += [v.name for v in value] if isinstance(value, list) else [self._edge(value)]
        while inputs and not inputs[-1]:
            inputs.pop()
        written = []
        for name in signature.written:
            cache = arguments[name].name
            written.append(f"{cache}.{node.name}")
            self.types[written[-1]] = self.types[cache]
            self.caches[cache] = written[-1]
        attributes = {name: _attribute(arguments[name]) for name in signature.attributes}
        name = signature.overload._schema.name.partition("::")[2]
        self.body.emit(name, *inputs, out=[*outputs, *written], domain=DOMAIN, **attributes)

    def _edge(self, value: Any) -> str:
        """The edge of an argument; a cache is what the last write left."""
        return "" if value is None else self.caches.get(value.name, value.name)

    def _bound(self, node: Node, outputs: Sequence[str]) -> Call | None:
        namespace, op, overload = _target(node.target)
        if namespace != "aten":
            return None
        packet = getattr(torch.ops.aten, op)
        arguments = self._arguments(node, getattr(packet, overload))
        val = node.val
        dtype = val.get("dtype", "int64") if isinstance(val, dict) else ""
        return Call(arguments, outputs, dtype)

    def _arguments(self, node: Node, op: torch._ops.OpOverload) -> dict[str, Any]:
        given = [self._decode(value) for value in node.args]
        named = {key: self._decode(value) for key, value in node.kwargs.items()}
        bound = {}
        for index, argument in enumerate(op._schema.arguments):
            if index < len(given):
                bound[argument.name] = given[index]
            elif argument.name in named or argument.has_default_value():
                bound[argument.name] = named.get(argument.name, argument.default_value)
        return bound

    def _decode(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._decode(item) for item in value]
        if isinstance(value, dict):
            [(tag, content)] = value.items()
            if tag == "n":
                return self.values[content]
            if tag == "tuple":
                return [self._decode(item) for item in content]
            return float(content) if tag == "float" else f"{tag}:{content}"
        return value

    def _results(self, node: Node, inputs: Sequence[str]) -> list[str]:
        """A function's outputs must be made in it, each once: copies where they are not."""
        wanted = [self.values[name].name for name in references(node.args)]
        names: list[str] = []
        for value in [*wanted, *self.caches.values()]:
            name = value
            if value in inputs or value in names:
                name = f"{value}.{len(names)}"
                self.body.about(name, {})
                self.body.emit("Identity", value, out=name)
            names.append(name)
        return names


def _target(target: str) -> tuple[str, str, str]:
    """Namespace, op and overload of a full name: ``aten.view.default``, ``operator.mul``."""
    namespace, _, rest = target.partition(".")
    op, _, overload = rest.partition(".")
    return namespace, op, overload


def _attribute(value: Any) -> Any:
    if isinstance(value, str) and value.startswith("dtype:"):
        return DTYPES[value.removeprefix("dtype:")]
    return int(value) if isinstance(value, bool) else value
