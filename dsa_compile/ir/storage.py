"""Storages: the memory that each value of a graph lives in, and what each call reads and writes.

The ops' schemas give both: ``Tensor(a) -> Tensor(a)`` is a view, ``Tensor(a!)`` is written. A
storage is named by the node, and the place among its results, that first had it.
"""

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from dsa_compile.ops import STREAM_OPS

aten = torch.ops.aten

# Views where the layout allows it, copies where not: they count as both.
_MAYBE_COPIES = frozenset(
    {
        aten.contiguous.default,
        aten.flatten.using_ints,
        aten.reshape.default,
        aten.to.dtype,
    }
)


@dataclass(frozen=True, order=True)
class Storage:
    """Memory, by who had it first; ordered as it is made.

    Attributes:
        index: position in the graph of the node that had it first.
        entry: which of that node's results.
        node: that node. Nodes hash by their address, which another run would not repeat.
    """

    index: int
    entry: int
    node: fx.Node = field(compare=False)


Held = frozenset[Storage]
_NOTHING: Held = frozenset()


@dataclass
class Uses:
    """Uses of memory by one call; none if it only makes a view.

    Attributes:
        reads: storages that it reads.
        writes: storages that it writes in place.
        makes: storages of its results, in their order.
    """

    reads: set[Storage] = field(default_factory=set)
    writes: set[Storage] = field(default_factory=set)
    makes: list[Storage] = field(default_factory=list)

    def touches(self) -> set[Storage]:
        """Storages that the call reads, writes or makes."""
        return self.reads.union(self.writes, self.makes)


class Memory:
    """The storages of a graph.

    Attributes:
        uses: of every call that reads, writes or makes a tensor; the others run no kernel.
        released: for every storage that calls made, the position of the last node that holds it,
            after which the host lets go of it. Those of inputs and results are not in it.
        results: storages that the region returns.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self._held: dict[fx.Node, tuple[Held, ...]] = {}
        self.uses: dict[fx.Node, Uses] = {}
        self.released: dict[Storage, int] = {}
        self.results: Held = _NOTHING
        for index, node in enumerate(graph.nodes):
            if node.op == "placeholder":
                self._held[node] = (frozenset({Storage(index, 0, node)}),)
                continue
            inputs = self.holds(*node.all_input_nodes)
            if node.op == "output":
                self.results = inputs
                continue
            if node.op == "call_function" and node.target not in STREAM_OPS:
                self._call(index, node)
            # a node that nobody takes is dropped where it stands, a value after its last use
            kept = inputs | self.holds(node)
            self.released.update((s, index) for s in kept if s.node.op != "placeholder")
        for storage in self.results & self.released.keys():
            del self.released[storage]

    def holds(self, *nodes: fx.Node) -> Held:
        """The storages that these nodes' values are in."""
        return _NOTHING.union(*(held for node in nodes for held in self._held.get(node, ())))

    def holder(self, storage: Storage) -> fx.Node:
        """A node whose value is one tensor in this storage."""
        return next(
            node
            for node, held in self._held.items()
            if len(held) == 1 and storage in held[0] and not _yields_list(node)
        )

    def dependencies(self) -> dict[fx.Node, set[fx.Node]]:
        """Earlier calls that must run before each call in ``uses``, in order.

        Reads come after the write before them, writes after the reads and the write before them.
        """
        writer: dict[Storage, fx.Node] = {}
        readers: dict[Storage, set[fx.Node]] = {}
        found: dict[fx.Node, set[fx.Node]] = {}
        for node, uses in self.uses.items():
            touched = uses.touches()
            before = {writer[storage] for storage in touched if storage in writer}
            for storage in uses.writes:
                before |= readers.pop(storage, set())
            for storage in uses.reads - uses.writes:
                readers.setdefault(storage, set()).add(node)
            writer.update(dict.fromkeys(uses.writes.union(uses.makes), node))
            found[node] = before
        return found

    def _call(self, index: int, node: fx.Node) -> None:
        if node.target is operator.getitem:
            source, entry = node.args[0], node.args[1]
            assert isinstance(source, fx.Node)
            assert isinstance(entry, int)
            held = self._held[source]
            self._held[node] = (held[0] if _yields_list(source) else held[entry],)
            return
        if not isinstance(node.target, OpOverload):  # nothing is known: it may read all it is given
            made = Storage(index, 0, node)
            self._held[node] = (frozenset({made}),)
            self.uses[node] = Uses(set(self.holds(*node.all_input_nodes)), set(), [made])
            return
        self._operator(index, node, node.target)

    def _operator(self, index: int, node: fx.Node, op: OpOverload) -> None:
        uses = Uses()
        aliased: set[Storage] = set()  # what the results may be views of
        for argument, value in arguments(node, op):
            storages = self.holds(*_nodes(value))
            if argument.alias_info is not None:
                aliased |= storages
            if argument.alias_info is not None and argument.alias_info.is_write:
                uses.writes |= storages
            else:
                uses.reads |= storages
        held = []
        for entry, result in enumerate(op._schema.returns):
            fresh = result.alias_info is None or op in _MAYBE_COPIES
            made = [Storage(index, entry, node)] if fresh else []
            uses.makes += made
            held.append(frozenset(made).union(aliased if result.alias_info is not None else ()))
        self._held[node] = tuple(held)
        if uses.makes or uses.writes:
            self.uses[node] = uses


def arguments(node: fx.Node, op: OpOverload) -> Iterator[tuple[torch.Argument, Any]]:
    """The arguments that a call gives, each with what the schema says of it."""
    for index, argument in enumerate(op._schema.arguments):
        if index < len(node.args):
            yield argument, node.args[index]
        elif argument.name in node.kwargs:
            yield argument, node.kwargs[argument.name]


def _nodes(value: Any) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.node.map_arg(value, found.append)
    return found


def _yields_list(node: fx.Node) -> bool:
    """Whether a node yields a list of tensors, all of one storage, as a split does."""
    if not isinstance(node.target, OpOverload) or len(node.target._schema.returns) != 1:
        return False
    return str(node.target._schema.returns[0].type).startswith("List")
