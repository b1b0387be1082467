"""A graph as plain data, without torch: what the compiler writes down of every stage.

:func:`~dsa_compile.ir.graph_json.graph_of` makes it of a region; all that prints, pairs, compares
or draws graphs reads it. Graphs of early stages hold ops that no artifact may run: here they are
text, and nothing is executed.

One node is one JSON object::

    {"op": "placeholder", "name": "hidden", "role": "value", "key": "hidden",
     "val": {"dtype": "float32", "shape": ["T", 128]}}
    {"op": "call_function", "name": "rms_norm", "target": "dsa.rms_norm.default",
     "keywords": "eps", "args": [{"n": "hidden"}, {"n": "weight"}, 1e-06],
     "path": "model.layers.0.input_layernorm"}
    {"op": "output", "name": "output", "args": [{"tuple": [{"n": "rms_norm"}]}]}

What is empty is left out.
"""

import keyword
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from dsa_compile.errors import ArtifactError
from dsa_compile.ir.dtype_names import SHORT_DTYPES

NOTES = ("path", "origin", "source", "was")
"""Fields of a node that are for a reader: they never decide what is computed."""

_TEXTS = ("target", "role", "key", "keywords", *NOTES)
_FIELDS = ("op", "name", "role", "key", "target", "keywords", "args", "kwargs", *NOTES, "val")
_EMPTY: tuple[Any, ...] = (None, "", (), {})
_COMMON = {"op", "name", "val", *NOTES}
_OPS = {
    "placeholder": _COMMON | {"role", "key"},
    "call_function": _COMMON | {"target", "args", "kwargs", "keywords"},
    "output": _COMMON - {"val"} | {"args"},
}
_MAX_TEXT = 1000
_MAX_NAME = 200
_MAX_NODES = 20_000  # a layer of the released model has about 100
_LAYER = re.compile(r"\blayers\.\d+")


@dataclass(frozen=True)
class Node:
    """One node; absent notes are empty.

    Attributes:
        name: in its graph.
        op: ``placeholder``, ``call_function`` or ``output``.
        target: what a call calls: ``dsa.rms_norm.default``.
        args: positional arguments in their JSON form: ``{"n": name}`` refers to a node.
        kwargs: arguments by name, likewise.
        val: what it yields: ``{"dtype", "shape"}``, ``{"scalar"}``, a list of these, or None.
        path: the module of the reference model.
        origin: the pass that made it, or ``export``.
        source: ``file:line`` of the reference model, if it is as exported.
        was: in a finished graph, its name while passes ran, if that was another.
        role: of an input: ``value``, ``batch``, ``cache``, ``weight``.
        key: of an input, its name in that role.
        keywords: names of the last of ``args``, separated by commas: those written by keyword.
    """

    name: str
    op: str
    target: str = ""
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    val: Any = None
    path: str = ""
    origin: str = ""
    source: str = ""
    was: str = ""
    role: str = ""
    key: str = ""
    keywords: str = ""

    @property
    def named(self) -> Mapping[str, Any]:
        """Arguments that are written by keyword."""
        names = self.keywords.split(", ") if self.keywords else []
        return dict(zip(names, self.args[len(self.args) - len(names) :], strict=False))

    @cached_property
    def inputs(self) -> tuple[str, ...]:
        """Names of the nodes that the arguments refer to, in order, each once."""
        return tuple(dict.fromkeys(references([self.args, *self.kwargs.values()])))

    @property
    def is_call(self) -> bool:
        """Whether it computes something."""
        return self.op == "call_function"

    @property
    def op_name(self) -> str:
        """The target without library and overload, such as ``rms_norm``."""
        return self.target.removesuffix(".default").split(".", 1)[-1]

    @property
    def module(self) -> str:
        """The path without the model's prefix, layers unnumbered, such as ``layers.*.mlp``."""
        return _LAYER.sub("layers.*", self.path).removeprefix("model.")

    @property
    def type_text(self) -> str:
        """``f32[T, 128]``; entries of several results joined by commas; empty for none."""
        if isinstance(self.val, list):
            return ", ".join(map(type_text, self.val))
        return type_text(self.val)

    def to_json(self) -> dict[str, Any]:
        """The node as a JSON object."""
        fields = ((name, getattr(self, name)) for name in _FIELDS)
        data = {name: value for name, value in fields if value not in _EMPTY}
        return data | {"args": list(self.args)} if self.args else data


@dataclass(frozen=True)
class Graph:
    """One region at one stage.

    Attributes:
        name: of the region, ``moe`` or ``moe.long``.
        outputs: names of its results.
        nodes: by name, in order; the last is the output.
    """

    name: str
    outputs: tuple[str, ...]
    nodes: dict[str, Node]

    @property
    def kind(self) -> str:
        """``moe`` of ``moe.long``."""
        return self.name.partition(".")[0]

    @property
    def variant(self) -> str:
        """``long`` of ``moe.long``; empty if the region is not split."""
        return self.name.partition(".")[2]

    @property
    def calls(self) -> list[Node]:
        """The computing nodes, in order."""
        return [node for node in self.nodes.values() if node.is_call]

    @property
    def inputs(self) -> list[Node]:
        """The placeholders, in order."""
        return [node for node in self.nodes.values() if node.op == "placeholder"]

    @property
    def results(self) -> tuple[str, ...]:
        """Names of the nodes that the region returns, as ``outputs`` names them."""
        last = next(reversed(self.nodes.values()), None)
        return tuple(references(last.args)) if last is not None and last.op == "output" else ()

    @cached_property
    def users(self) -> Mapping[str, tuple[str, ...]]:
        """Names of the nodes that use each node, in order."""
        found: dict[str, list[str]] = {name: [] for name in self.nodes}
        for node in self.nodes.values():
            for source in node.inputs:
                found[source].append(node.name)
        return {name: tuple(users) for name, users in found.items()}

    @cached_property
    def by_old_name(self) -> Mapping[str, Node]:
        """The nodes of a finished graph by the names they had while passes ran."""
        return {node.was or node.name: node for node in self.nodes.values()}

    def to_json(self) -> dict[str, Any]:
        """The graph as a JSON object: dicts, lists, strings and numbers only."""
        nodes = [node.to_json() for node in self.nodes.values()]
        return {"name": self.name, "outputs": list(self.outputs), "nodes": nodes}


def references(value: Any) -> Iterator[str]:
    """Names of the nodes in an argument, depth first."""
    if isinstance(value, Mapping):
        if value.keys() == {"n"}:
            yield value["n"]
            return
        value = value.values()
    if isinstance(value, list | tuple) or not isinstance(value, str | int | float | None):
        for item in value:
            yield from references(item)


def type_text(val: Any) -> str:
    """One value's type to read: ``bf16[T, 7168]``, ``S``, or empty."""
    if not isinstance(val, dict):
        return ""
    if "scalar" in val:
        return str(val["scalar"])
    dtype = str(val.get("dtype"))
    return f"{SHORT_DTYPES.get(dtype, dtype)}[{', '.join(map(str, val.get('shape', ())))}]"


def typed_call(target: str, arguments: Iterable[Any], types: Mapping[str, str]) -> str:
    """A call as its target and the types of the nodes in its arguments (in their JSON form)."""

    def text(value: Any) -> str:
        if isinstance(value, Mapping):
            if value.keys() == {"n"}:
                return types[value["n"]]
            value = value.get("tuple")
        nested = isinstance(value, list) and any(references(value))
        return f"[{', '.join(map(text, value))}]" if nested else ""

    return f"{target}({', '.join(filter(None, map(text, arguments)))})"


def graph_from_json(data: Any, where: str = "") -> Graph:
    """A graph from its JSON form, which may have been edited: its form is checked, not its calls.

    Args:
        data: what :meth:`Graph.to_json` made.
        where: how error messages call the file.

    Raises:
        ArtifactError: anything but a graph whose nodes take nodes before them, each of a name of
            its own, and which returns as many as it names; names the graph and the node.
    """
    prefix = where and f"{where}: "
    name, outputs, entries = _fields_of(data, prefix)
    nodes: dict[str, Node] = {}
    for entry in entries:
        try:
            node = _node(entry, nodes)
        except BadNodeError as error:
            raise error.of(f"{prefix}graph {name}", entry, len(nodes)) from None
        nodes[node.name] = node
    graph = Graph(name, outputs, nodes)
    if "output" not in (node.op for node in nodes.values()):
        raise ArtifactError(f"{prefix}graph {name}: no output for {len(outputs)} names; recompile")
    if len(graph.results) != len(outputs):
        raise ArtifactError(
            f"{prefix}graph {name}: {len(graph.results)} results for {len(outputs)} output names; "
            "recompile"
        )
    return graph


class BadNodeError(Exception):
    """Error in one node of a graph file; the message says what is wrong with it."""

    def of(self, graph: str, entry: Any, number: int) -> ArtifactError:
        """The error to raise, with the graph and the node, by its number if it has no name."""
        name = entry.get("name") if isinstance(entry, dict) else None
        label = name if name and is_text(name) else f"#{number}"
        remedy = "the file was edited or damaged, recompile"
        return ArtifactError(f"{graph}, node {label}: {self}; {remedy}")


def is_text(value: Any) -> bool:
    """Whether a value is a short line of text: it may stand in a comment of a printed program."""
    return isinstance(value, str) and len(value) <= _MAX_TEXT and value.isprintable()


def _fields_of(data: Any, prefix: str) -> tuple[str, tuple[str, ...], list[Any]]:
    if not isinstance(data, dict) or data.keys() != {"name", "outputs", "nodes"}:
        raise ArtifactError(
            f"{prefix}graph: expected an object with name, outputs and nodes; recompile"
        )
    name, outputs, nodes = data["name"], data["outputs"], data["nodes"]
    problem = ""
    if not name or not is_text(name):
        name, problem = "", "its name is not a short line of text"
    elif not isinstance(outputs, list) or not all(each and is_text(each) for each in outputs):
        problem = "outputs must be a list of names"
    elif len(set(outputs)) != len(outputs):
        problem = "an output is named twice"
    elif not isinstance(nodes, list) or len(nodes) > _MAX_NODES:
        problem = f"nodes must be a list of up to {_MAX_NODES}"
    if problem:
        raise ArtifactError(f"{prefix}{f'graph {name}'.strip()}: {problem}; recompile")
    return name, tuple(outputs), nodes


def _node(entry: Any, nodes: dict[str, Node]) -> Node:
    if nodes and next(reversed(nodes.values())).op == "output":
        raise BadNodeError("comes after the output")
    if not isinstance(entry, dict):
        raise BadNodeError("is not an object")
    op, name = entry.get("op"), entry.get("name")
    if not isinstance(op, str) or op not in _OPS:
        raise BadNodeError(f"op {op!r:.80} is not one of {', '.join(_OPS)}")
    if unknown := entry.keys() - _OPS[op]:
        raise BadNodeError(f"unknown field {min(unknown)!r:.80}")
    if not isinstance(name, str) or not name.isidentifier() or len(name) > _MAX_NAME:
        raise BadNodeError("its name is not an identifier")
    if keyword.iskeyword(name):
        raise BadNodeError("its name is reserved")
    if name in nodes:
        raise BadNodeError("a node of that name exists already")
    texts = {field: entry[field] for field in _TEXTS if field in entry}
    for which, text in texts.items():
        if not is_text(text):
            raise BadNodeError(f"its {which} is not a short line of text")
    args, kwargs = entry.get("args", []), entry.get("kwargs", {})
    if not isinstance(args, list) or not isinstance(kwargs, dict):
        raise BadNodeError("args must be a list and kwargs an object")
    for source in references([args, *kwargs.values()]):
        if not isinstance(source, str) or source not in nodes:
            raise BadNodeError(f"no earlier node {source!r:.80}")
    node = Node(name, op, args=tuple(args), kwargs=kwargs, val=entry.get("val"), **texts)
    if op == "output" and args != [{"tuple": [{"n": source} for source in references(args)]}]:
        raise BadNodeError("must return one tuple of tensors")
    return node
