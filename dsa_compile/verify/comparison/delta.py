"""The change that one rewrite made: matched subgraph, replacement, and which values must agree.

Two neighbouring stages of a compilation have the same nodes but for those that a rewrite took out
and put in, and nodes keep their names. Where a node that both have takes ``b`` in one and ``a`` in
the other, ``a`` stands for ``b``: these pairs are what must agree. A node that yields or takes
another type than before is part of what changed, so that the values of a pair have one type.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from dsa_compile.ir.region import Region, Role
from dsa_compile.ir.tensor_info import describe
from dsa_compile.verify.execution.interpreter import Interpreter
from dsa_compile.verify.execution.stages import result_nodes

Pair = tuple[str, str]


@dataclass(frozen=True)
class Side:
    """The part of one graph that a rewrite touched.

    Attributes:
        region: the whole graph.
        nodes: the part's calls, in order.
        inputs: placeholders and calls outside that the part takes, in order.
    """

    region: Region
    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    _interpreters: dict[bool, Interpreter] = field(default_factory=dict, compare=False, repr=False)

    def interpreter(self, exact: bool) -> Interpreter:
        """Interpreter of the part, in exact arithmetic or not; made once."""
        if exact not in self._interpreters:
            self._interpreters[exact] = Interpreter(self.nodes, self.inputs, exact)
        return self._interpreters[exact]


@dataclass(frozen=True)
class Delta:
    """A matched subgraph and its replacement.

    Attributes:
        before: the matched part.
        after: the part that stands in its place.
        pairs: names of the values that must agree, of ``before`` and of ``after``.
    """

    before: Side
    after: Side
    pairs: tuple[Pair, ...]

    @property
    def varies(self) -> bool:
        """Whether other inputs than captured ones make sense.

        They do not where one side makes a value anew that the other takes as it was captured.
        """
        made = [{node.name for node in side.nodes} for side in (self.before, self.after)]
        taken = [
            {node.name for call in side.nodes for node in call.all_input_nodes}
            for side in (self.before, self.after)
        ]
        return all(
            (b in made[0] or b in taken[1]) and (a in made[1] or a in taken[0])
            for b, a in self.pairs
        )


def find_delta(before: Region, after: Region) -> Delta | None:
    """Find what a rewrite changed between two stages of a region; None if nothing that computes.

    Values that depend on a changed call without being taken by another one are left out: they agree
    if the pairs do. Calls that share a cache with a changed call are taken in, as are calls between
    two changed ones.
    """
    old, new = _named(before), _named(after)
    common = [name for name in old if name in new and _same_call(old[name], new[name])]
    changed = {name for name in (*old, *new) if name not in set(common)}
    pairs = _pairs(old, new, common, before, after)
    if not changed and all(b == a for b, a in pairs):
        return None
    inside = _closed(changed, (old, new))
    crossing = [
        (b, a) for b, a in pairs if (b != a or b in changed) and not _inner(b, a, inside, old, new)
    ]
    crossing += [(n, n) for n in common if n in inside and _leaves(n, inside, (old, new))]
    return Delta(
        _side(before, old, inside, {b for b, _ in crossing}),
        _side(after, new, inside, {a for _, a in crossing}),
        tuple(dict.fromkeys(crossing)),
    )


def _named(region: Region) -> dict[str, fx.Node]:
    return {node.name: node for node in region.graph.nodes if node.op == "call_function"}


def _same_call(b: fx.Node, a: fx.Node) -> bool:
    """Whether two calls differ in nothing but the values that they take, of the same types."""
    if b.target is not a.target or not _same_types(b, a):
        return False
    blank = [fx.node.map_arg((n.args, n.kwargs), lambda _: "%") for n in (b, a)]
    return bool(blank[0] == blank[1])


def _same_types(b: fx.Node, a: fx.Node) -> bool:
    """Whether two calls yield and take the same types: values of others cannot be compared."""
    values = [[n.meta.get("val") for n in (node, *node.all_input_nodes)] for node in (b, a)]
    return len(values[0]) == len(values[1]) and all(
        one is other or describe(one) == describe(other) for one, other in zip(*values, strict=True)
    )


def _taken(node: fx.Node) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.node.map_arg((node.args, node.kwargs), found.append)
    return found


def _pairs(
    old: dict[str, fx.Node],
    new: dict[str, fx.Node],
    common: Iterable[str],
    before: Region,
    after: Region,
) -> list[Pair]:
    found = [
        (b.name, a.name)
        for name in common
        for b, a in zip(_taken(old[name]), _taken(new[name]), strict=True)
    ]
    results = [result_nodes(before), result_nodes(after)]
    found += [(results[0][n].name, results[1][n].name) for n in results[0] if n in results[1]]
    return list(dict.fromkeys(found))


def _closed(changed: set[str], graphs: tuple[dict[str, fx.Node], ...]) -> set[str]:
    """``changed``, and what has to be run with it: see :func:`find_delta`."""
    inside = set(changed)
    while True:
        grown = set(inside)
        for nodes in graphs:
            mine = [nodes[name] for name in inside if name in nodes]
            below = _reached(mine, lambda n: n.users) & _reached(mine, lambda n: n.all_input_nodes)
            grown |= {node.name for node in below if node.op == "call_function"}
            caches = {c for node in mine for c in _caches(node)}
            grown |= {user.name for cache in caches for user in cache.users}
        if grown == inside:
            return inside
        inside = grown


def _reached(start: Iterable[fx.Node], step: Any) -> set[fx.Node]:
    seen: set[fx.Node] = set()
    todo = list(start)
    while todo:
        for node in step(todo.pop()):
            if node not in seen:
                seen.add(node)
                todo.append(node)
    return seen


def _caches(node: fx.Node) -> list[fx.Node]:
    return [n for n in node.all_input_nodes if n.meta.get("role") is Role.CACHE]


def _leaves(name: str, inside: set[str], graphs: tuple[dict[str, fx.Node], ...]) -> bool:
    """Whether a value is used outside the part, in either graph."""
    return any(user.name not in inside for nodes in graphs for user in nodes[name].users)


def _inner(
    b: str, a: str, inside: set[str], old: dict[str, fx.Node], new: dict[str, fx.Node]
) -> bool:
    """Whether two values are used by the part alone: then its results say if they matter."""
    if b not in old or a not in new:
        return False
    return all(user.name in inside for node in (old[b], new[a]) for user in node.users)


def _side(region: Region, calls: dict[str, fx.Node], inside: set[str], results: set[str]) -> Side:
    part = [node for name, node in calls.items() if name in inside]
    taken = {name for node in part for name in map(str, node.all_input_nodes)} | results
    mine = {node.name for node in part}
    outside = [n for n in region.graph.nodes if n.name in taken and n.name not in mine]
    return Side(region, tuple(part), tuple(outside))
