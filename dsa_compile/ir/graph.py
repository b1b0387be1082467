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

import re
from collections.abc import Iterator, Mapping
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
        return tuple(dict.fromkeys(references([self.args, self.kwargs])))

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


def graph_from_json(data: Any, where: str) -> Graph:
    """A graph from its JSON form.

    Args:
        data: what :meth:`Graph.to_json` made.
        where: how error messages call the file.

    Raises:
        ArtifactError: it is no graph: a field is missing or of the wrong type, a name occurs twice,
            an argument refers to no earlier node, or there are more or fewer results than names.
    """
    try:
        name, outputs, entries = data["name"], tuple(data["outputs"]), data["nodes"]
        nodes: dict[str, Node] = {}
        for entry in entries:
            node = _node(entry)
            missing = [source for source in node.inputs if source not in nodes]
            if node.name in nodes or missing:
                fault = "exists already"
                if missing:
                    fault = f"refers to {missing[0]!r:.40}, no earlier node"
                raise ArtifactError(f"{where}: graph {name}, node {node.name}: {fault}; {_REMEDY}")
            nodes[node.name] = node
    except (KeyError, TypeError, AttributeError) as error:
        raise ArtifactError(f"{where}: not a graph ({error!r:.80}); {_REMEDY}") from None
    if not all(isinstance(text, str) for text in (name, *outputs)):
        raise ArtifactError(f"{where}: a graph's names are not text; {_REMEDY}")
    graph = Graph(name, outputs, nodes)
    if len(graph.results) != len(outputs):
        raise ArtifactError(
            f"{where}: graph {name} names {len(outputs)} results and returns {len(graph.results)}; "
            f"{_REMEDY}"
        )
    return graph


def _node(entry: Mapping[str, Any]) -> Node:
    texts = {field: entry[field] for field in _TEXTS if field in entry}
    for text in (entry["name"], entry["op"], *texts.values()):
        if not isinstance(text, str) or not text.isprintable():
            raise TypeError(f"{text!r:.40} is not a line of text")
    args, kwargs = entry.get("args", []), entry.get("kwargs", {})
    if not isinstance(args, list) or not isinstance(kwargs, dict):
        raise TypeError("args is no list, or kwargs no object")
    return Node(entry["name"], entry["op"], **texts, args=tuple(args), kwargs=kwargs,
                val=entry.get("val"))  # fmt: skip


_REMEDY = "the file was edited or damaged, recompile"
