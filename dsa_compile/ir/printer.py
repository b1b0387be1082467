"""A region as a Python function that a person can read and an interpreter can run.

::

    def moe_long(
        # values
        hidden,  # f32[T, 128]
        # weights
        norm,  # f32[128]  {layer}.input_layernorm.weight
    ):
        normed = ops.dsa.rms_norm(hidden, norm, eps=1e-06)  # f32[T, 128]  layers.*.input_layernorm
        left, right = ops.aten.split_with_sizes(normed, [64, 64], dim=-1)  # f32[T, 64], f32[T, 64]
        return left, right  # gate, up

The text is valid Python over the names ``ops`` (``torch.ops``), ``torch``, ``operator`` and
``math``. Constants are written by keyword, and so is what follows them. An op without an overload
name means its ``default`` overload. Node names are kept, so that printed programs, graph files and
error messages speak of the same things, and a rewrite shows in a diff as the lines it changed.
"""

import operator
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

from dsa_compile.ir.graph_json import target_name
from dsa_compile.ir.keywords import keywords
from dsa_compile.ir.region import Region, Role
from dsa_compile.ir.storage import Memory
from dsa_compile.ir.streams import Timeline, has_streams
from dsa_compile.ir.tensor_info import describe
from dsa_compile.ops import ON_STREAM

_HEADINGS = {
    Role.VALUE: "values",
    Role.BATCH: "batch",
    Role.CACHE: "caches",
    Role.WEIGHT: "weights",
    None: "inputs",
}
_FREE_NAMES = frozenset({"ops", "torch", "operator", "math", "float", "slice"})


def region_to_python(region: Region) -> str:
    """The region as the text of one Python function, ending in a newline.

    Parameters are grouped by role, in the graph's order within each: inputs are bound by name.

    Raises:
        TypeError: a node other than a placeholder, a call of a function, or the output.
    """
    return "\n".join(_Printer(region).lines()) + "\n"


class _Printer:
    def __init__(self, region: Region) -> None:
        self.region = region
        self.names = _names(region.graph)
        self.waits = _waits(region.graph) if has_streams(region.graph) else {}

    def lines(self) -> Iterator[str]:
        yield from self._signature()
        for node in self.region.graph.nodes:
            if node.op == "call_function":
                if node.target is operator.getitem and _unpacks(node.args[0]):
                    continue  # its name stands on the line of the call that it unpacks
                if node.target is ON_STREAM:
                    yield ""
                yield "    " + self._call(node)
            elif node.op == "output":
                yield "    " + self._return(node)
            elif node.op != "placeholder":
                raise TypeError(
                    f"region {self.region.name}, node {node.name}: a region has no {node.op}"
                )

    def _signature(self) -> Iterator[str]:
        function = re.sub(r"\W", "_", self.region.name)
        inputs = self.region.inputs()
        if not inputs:
            yield f"def {function}():"
            return
        yield f"def {function}("
        for role, heading in _HEADINGS.items():
            group = [node for node in inputs if node.meta.get("role") == role]
            if group:
                yield f"    # {heading}"
            for node in group:
                key = str(node.meta.get("key", ""))
                note = _comment(_type_text(node), "" if key == node.name else key)
                yield f"    {self.names[node]},{note}"
        yield "):"

    def _call(self, node: fx.Node) -> str:
        assert callable(node.target)
        expression = self._expression(node.target, node)
        path = re.sub(r"\blayers\.\d+", "layers.*", str(node.meta.get("path") or ""))
        path = path.removeprefix("model.")
        if _returns_nothing(node.target):
            return expression + _comment(self.waits.get(node, ""), path)
        if not _unpacks(node):
            return f"{self.names[node]} = {expression}{_comment(_type_text(node), path)}"
        by_index: dict[Any, fx.Node] = {user.args[1]: user for user in node.users}
        entries = [by_index.get(index) for index in range(_entries(node))]
        targets = ["_" if entry is None else self.names[entry] for entry in entries]
        return f"{_tuple(targets, '(')} = {expression}{_comment(_type_text(node), path)}"

    def _expression(self, target: Callable[..., Any], node: fx.Node) -> str:
        if target is operator.getitem and not node.kwargs:
            return f"{self._value(node.args[0])}[{self._value(node.args[1])}]"
        named = keywords(node)
        first = len(node.args) - len(named)
        arguments = [self._value(value) for value in node.args[:first]]
        arguments += [
            f"{name}={self._value(value)}"
            for name, value in zip(named, node.args[first:], strict=True)
        ]
        arguments += [
            f"{name}={self._value(value)}"
            for name, value in node.kwargs.items()
            if not _is_default_none(target, name, value)
        ]
        return f"{_callee(target)}({', '.join(arguments)})"

    def _return(self, node: fx.Node) -> str:
        result = node.args[0]
        if not isinstance(result, list | tuple):
            return f"return {self._value(result)}"
        return f"return {_tuple([self._value(item) for item in result], '(')}" + _comment(
            ", ".join(self.region.outputs), ""
        )

    def _value(self, value: Any) -> str:
        if isinstance(value, fx.Node):
            return self.names[value]
        if isinstance(value, list):
            return f"[{', '.join(map(self._value, value))}]"
        if isinstance(value, tuple):
            return f"({_tuple([self._value(item) for item in value], '')})"
        if isinstance(value, slice):
            parts = (value.start, value.stop, value.step)
            return f"slice({', '.join(map(self._value, parts))})"
        if isinstance(value, float) and value - value != 0:  # infinite or not a number
            return f'float("{value}")'
        if isinstance(value, torch.device):
            return f'torch.device("{value}")'
        if isinstance(value, torch.SymInt):
            return str(describe(value))
        return repr(value)


def _waits(graph: fx.Graph) -> dict[fx.Node, str]:
    """Text that names what each wait waits for."""
    found = {}
    for wait, recorded in Timeline(graph, Memory(graph).uses).waits.items():
        if recorded is not None:
            call = "the inputs" if recorded.after is None else recorded.after.name
            found[wait] = f"stream {recorded.stream}: {call}"
    return found


def _names(graph: fx.Graph) -> dict[fx.Node, str]:
    """The nodes' names, changed only where one would hide a name that the text relies on."""
    taken = {node.name for node in graph.nodes}
    names = {}
    for node in graph.nodes:
        name = node.name
        while name in _FREE_NAMES or (name != node.name and name in taken):
            name += "_"
        taken.add(name)
        names[node] = name
    return names


def _tuple(items: list[str], bracket: str) -> str:
    """``a, b``; one item keeps the comma that makes it a tuple, in brackets if ``bracket``."""
    if len(items) == 1:
        return f"({items[0]},)" if bracket else f"{items[0]},"
    return ", ".join(items) or ("()" if bracket else "")


def _entries(node: fx.Node) -> int:
    """Number of entries that a call yields; 0 where it yields one value or that is not known."""
    if isinstance(node.target, torch._ops.OpOverload) and len(node.target._schema.returns) > 1:
        return len(node.target._schema.returns)
    info = describe(node.meta.get("val"))
    return len(info) if isinstance(info, tuple) else 0


def _unpacks(node: Any) -> bool:
    """Whether every use of a call takes one entry, each entry at most once."""
    if not isinstance(node, fx.Node) or not node.users or not (count := _entries(node)):
        return False
    users = list(node.users)
    if any(user.target is not operator.getitem for user in users):
        return False
    indices = [user.args[1] for user in users]
    return len(set(indices)) == len(indices) and all(
        isinstance(index, int) and 0 <= index < count for index in indices
    )


def _returns_nothing(target: Callable[..., Any]) -> bool:
    return isinstance(target, torch._ops.OpOverload) and not target._schema.returns


def _is_default_none(target: Callable[..., Any], name: str, value: Any) -> bool:
    """Whether the argument may be left out: a None where None is what the op assumes."""
    if value is not None or not isinstance(target, torch._ops.OpOverload):
        return False
    return any(
        argument.name == name and argument.has_default_value() and argument.default_value is None
        for argument in target._schema.arguments
    )


def _callee(target: Callable[..., Any]) -> str:
    name = target_name(target)
    if isinstance(target, torch._ops.OpOverload):
        return "ops." + name.removesuffix(".default")
    return name


def _type_text(node: fx.Node) -> str:
    info = describe(node.meta.get("val"))
    return ", ".join(map(str, info)) if isinstance(info, tuple) else str(info or "")


def _comment(*parts: str) -> str:
    text = "  ".join(part for part in parts if part)
    if not text.isprintable():
        # a line break here would turn the rest of the comment into code
        text = text.encode("unicode_escape").decode()
    return f"  # {text}" if text else ""
