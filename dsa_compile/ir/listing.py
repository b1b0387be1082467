"""A graph as a Python function that a person can read and an interpreter can run.

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

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dsa_compile.ir.graph import Graph, Node

GETITEM = "operator.getitem"
_ON_STREAM = "dsa.on_stream.default"
_HEADINGS = {
    "value": "values",
    "batch": "batch",
    "cache": "caches",
    "weight": "weights",
    "": "inputs",
}
_FUNCTIONS = ("operator.", "math.", "torch.", "builtins.")
_FREE_NAMES = frozenset({"ops", "torch", "operator", "math", "float", "slice"})
_PREFIXED = ("dtype", "layout", "memory_format")  # JSON tags of members of torch


@dataclass(frozen=True)
class Statement:
    """One line of a graph.

    Attributes:
        nodes: names that the line defines: a call, or a call and the entries taken of it at once.
        code: ``a, b = ops.aten.split_with_sizes(x, [64, 64], -1)``.
        type: of its value, to read.
        module: of the reference model.
    """

    nodes: tuple[str, ...]
    code: str
    type: str = ""
    module: str = ""

    def __str__(self) -> str:
        return self.code + _comment(self.type, self.module)


class Listing:
    """The statements of a graph.

    Args:
        graph: to print.
        names: what nodes are called in the text, where that is not their own name.
        notes: comments on calls that yield nothing, by their names.
    """

    def __init__(
        self,
        graph: Graph,
        names: Mapping[str, str] | None = None,
        notes: Mapping[str, str] | None = None,
    ) -> None:
        self.graph = graph
        self._given = names or {}
        self._notes = notes or {}
        self._names: dict[str, str] = {}
        taken = set(graph.nodes)
        for name in graph.nodes:
            free = name
            while free in _FREE_NAMES or (free != name and free in taken):
                free += "_"
            taken.add(free)
            self._names[name] = free

    def function(self) -> Iterator[str]:
        """Lines of the whole function; parameters are grouped by role: inputs are bound by name."""
        yield from self._signature()
        for node in self.graph.calls:
            if not self._is_entry(node):
                if node.target == _ON_STREAM:
                    yield ""
                yield f"    {self.statement(node)}"
        yield f"    {self._return()}"

    def _signature(self) -> Iterator[str]:
        function = re.sub(r"\W", "_", self.graph.name)
        inputs = self.graph.inputs
        yield f"def {function}(" + "):" * (not inputs)
        for role, heading in _HEADINGS.items():
            group = [node for node in inputs if node.role == role]
            if group:
                yield f"    # {heading}"
            for node in group:
                note = _comment(node.type_text, "" if node.key == node.name else node.key)
                yield f"    {self._name(node.name)},{note}"
        if inputs:
            yield "):"

    def _return(self) -> str:
        (result,) = next(reversed(self.graph.nodes.values())).args
        items = result.get("tuple") if isinstance(result, Mapping) else result
        if not isinstance(items, list):
            return f"return {self._value(result)}"
        values = _tuple([self._value(item) for item in items], "(")
        return f"return {values}" + _comment(", ".join(self.graph.outputs))

    def statements(self) -> Iterator[Statement]:
        """Statements of every call, in order."""
        for node in self.graph.calls:
            if not self._is_entry(node):
                yield self.statement(node)

    def statement(self, node: Node) -> Statement:
        """The line that computes a node."""
        if self._is_entry(node):
            node = self.graph.nodes[node.inputs[0]]
        expression = self.expression(node)
        if node.val is None and not self.graph.users[node.name]:  # it only writes
            note = self._notes.get(node.name, "")
            return Statement((node.name,), expression, note, node.module)
        if not self._unpacks(node):
            code = f"{self._name(node.name)} = {expression}"
            return Statement((node.name,), code, node.type_text, node.module)
        users = self.graph.users[node.name]
        by_index = {self.graph.nodes[user].args[1]: user for user in users}
        entries = [by_index.get(index) for index in range(len(node.val))]
        targets = ["_" if entry is None else self._name(entry) for entry in entries]
        code = f"{_tuple(targets, '(')} = {expression}"
        return Statement((node.name, *users), code, node.type_text, node.module)

    def expression(self, node: Node) -> str:
        """Expression that a node computes: ``ops.dsa.rms_norm(hidden, weight, eps=1e-06)``."""
        named = node.named
        values = [self._value(value) for value in node.args[: len(node.args) - len(named)]]
        if node.target == GETITEM and len(values) == 2 and not node.kwargs:
            return f"{values[0]}[{values[1]}]"
        values += [f"{name}={self._value(value)}" for name, value in named.items()]
        # an argument given as None is one that the op may go without
        values += [f"{k}={self._value(v)}" for k, v in node.kwargs.items() if v is not None]
        is_function = node.target.startswith(_FUNCTIONS)
        callee = node.target if is_function else "ops." + node.target.removesuffix(".default")
        return f"{callee}({', '.join(values)})"

    def _is_entry(self, node: Node) -> bool:
        """Whether the node's name stands on the line of the call that it unpacks."""
        return (
            node.target == GETITEM
            and bool(node.inputs)
            and self._unpacks(self.graph.nodes[node.inputs[0]])
        )

    def _unpacks(self, node: Node) -> bool:
        """Whether every use of a call takes one entry, each entry at most once."""
        users = [self.graph.nodes[user] for user in self.graph.users[node.name]]
        if not users or not isinstance(node.val, list):
            return False
        if any(user.target != GETITEM for user in users):
            return False
        indices = [user.args[1] for user in users]
        return len(set(map(str, indices))) == len(indices) and all(
            type(index) is int and 0 <= index < len(node.val) for index in indices
        )

    def _name(self, node: str) -> str:
        return self._given.get(node, self._names[node])

    def _value(self, value: Any) -> str:
        if isinstance(value, list):
            return f"[{', '.join(map(self._value, value))}]"
        if not isinstance(value, Mapping) or len(value) != 1:
            return repr(value)
        [(tag, content)] = value.items()
        if tag == "n":
            return self._name(content)
        if tag == "tuple":
            return f"({_tuple([self._value(item) for item in content], '')})"
        if tag == "slice":
            return f"slice({', '.join(map(self._value, content))})"
        if tag == "float":
            return f'float("{content}")'
        if tag == "device":
            return f'torch.device("{content}")'
        return f"torch.{content}" if tag in _PREFIXED else str(content)


def _comment(*parts: str) -> str:
    text = "  ".join(part for part in parts if part)
    if not text.isprintable():
        # a line break here would turn the rest of the comment into code
        text = text.encode("unicode_escape").decode()
    return f"  # {text}" if text else ""


def _tuple(items: list[str], bracket: str) -> str:
    """``a, b``; one item keeps the comma that makes it a tuple, in brackets if ``bracket``."""
    if len(items) == 1:
        return f"({items[0]},)" if bracket else f"{items[0]},"
    return ", ".join(items) or ("()" if bracket else "")
