"""A program at any stage as an ONNX model, to open in Netron or to run.

The main graph is a step: the embedding, one node a layer, the head. Each region is an ONNX function
that those nodes call, and so is each ``dsa`` op that has a body in standard ops. Weights are inputs
of the model unless their values are given; caches go in and come out written.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx
from onnx import helper

from dsa_compile.inspect.onnx.bodies import DOMAIN, OPSET, needed
from dsa_compile.inspect.onnx.body import Body, tensor_type
from dsa_compile.inspect.onnx.region import region_function
from dsa_compile.inspect.onnx.schemas import VERSION
from dsa_compile.ir.graph import Graph, Node
from dsa_compile.version import __version__
from dsa_compile.weights.canonical import template_of

REGIONS = "dsa.regions"
"""Domain of the functions that stand for regions."""
IR_VERSION = 10  # the first with types and notes inside functions


@dataclass(frozen=True)
class Step:
    """One call of a region.

    Attributes:
        region: which.
        label: what the call is named.
        variables: of the call; a decoder layer's have ``layer``.
    """

    region: Graph
    label: str
    variables: Mapping[str, str]

    def name(self, node: Node) -> str:
        """Name of an input in the model: a weight or cache of a layer has its own."""
        if node.role in ("batch", "value"):
            return node.key
        try:
            return template_of(node.key).format_map(self.variables)
        except KeyError:  # of a prologue or a head, which names no layer
            return node.key if node.key.startswith("lm_head.") else f"model.{node.key}"


def export(steps: Sequence[Step], title: str) -> onnx.ModelProto:
    """The model of one step.

    Args:
        steps: the calls in order; their regions are recorded graphs, as JSON has them.
        title: what the graph is called.

    Returns:
        A model that passes ``onnx.checker``, without weights.
    """
    functions: dict[str, onnx.FunctionProto] = {}
    main = _Main()
    for step in steps:
        name = _identifier(step.region.name)
        if name not in functions:
            functions[name] = region_function(step.region, REGIONS, name)
        main.call(step, name)
    calls = [node for f in functions.values() for node in f.node if node.domain == DOMAIN]
    local = [*needed(calls), *functions.values()]
    domains = {node.domain for function in local for node in function.node} | {REGIONS}
    return helper.make_model(
        main.graph(title),
        functions=local,
        ir_version=IR_VERSION,
        producer_name="dsa-compile",
        producer_version=__version__,
        opset_imports=[
            helper.make_opsetid(domain, VERSION if domain else OPSET)
            for domain in sorted(domains | {""})
        ],
    )


def _identifier(name: str) -> str:
    return name.replace(".", "_")


class _Main:
    """The main graph in the making: values by name, as a step hands them on."""

    def __init__(self) -> None:
        self.body = Body()
        self.inputs: dict[str, onnx.ValueInfoProto] = {}
        self.written: dict[str, onnx.ValueInfoProto] = {}
        self.values: dict[str, str] = {}
        self.types: dict[str, Any] = {}

    def call(self, step: Step, function: str) -> None:
        region = step.region
        inputs = [self._input(step, node) for node in region.inputs]
        names = [f"{step.label}.{key}" for key in region.outputs]
        caches = [node for node in region.inputs if node.role == "cache"]
        written = [f"{step.name(node)}.written" for node in caches]
        self.body.about(step.label, {"region": region.name})
        self.body.emit(function, *inputs, out=[*names, *written], domain=REGIONS)
        for key, name, result in zip(region.outputs, names, region.results, strict=True):
            self.values[key], self.types[key] = name, region.nodes[result].val
        for node, name in zip(caches, written, strict=True):
            self.written[name] = helper.make_value_info(name, tensor_type(node.val))

    def _input(self, step: Step, node: Node) -> str:
        if node.role == "value" and node.key in self.values:
            return self.values[node.key]
        # a region exported alone takes as inputs the values that others would have made
        name = step.name(node)
        self.inputs[name] = helper.make_value_info(name, tensor_type(node.val))
        return name

    def graph(self, title: str) -> onnx.GraphProto:
        """The main graph; its results are the logits, or all values where none are made."""
        outputs = []
        for key in ["logits"] if "logits" in self.values else self.values:
            name = f"{key}.out" if key in self.inputs else key
            self.body.about(name, {})
            self.body.emit("Identity", self.values[key], out=name)
            outputs.append(helper.make_value_info(name, tensor_type(self.types[key])))
        outputs += self.written.values()
        return helper.make_graph(self.body.nodes, title, list(self.inputs.values()), outputs)
