"""Pairs of nodes of two graphs that are the same node.

Names are not trusted for more than they mean: within a pass a node keeps its name unless a rewrite
says that it made it; between programs names mean nothing, and nodes are the same if they compute
the same from the same, or else stand in the same order with the same op, constants and module.
"""

import difflib
import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from dsa_compile.ir.graph import Graph, Node, references
from dsa_compile.ir.listing import GETITEM


@dataclass(frozen=True)
class Change:
    """A node that both graphs have, and that differs.

    Attributes:
        before: its name in the first graph.
        after: and in the second.
        rewired: names in the first graph of inputs it no longer takes, and in the second of those
            it takes in their place, position by position.
        constants: whether an argument that is no node differs.
        retyped: whether its value has another type.
    """

    before: str
    after: str
    rewired: tuple[tuple[str, str], ...]
    constants: bool
    retyped: bool


@dataclass(frozen=True)
class Pairing:
    """Two graphs side by side.

    Attributes:
        before: the first graph; None if the second is new.
        after: the second graph; None if the first is gone.
        pairs: names in the first graph to names in the second.
        removed: names of the first graph that have no partner, in order.
        made: names of the second graph that have none, in order.
        changes: the pairs that differ, in order.
    """

    before: Graph | None
    after: Graph | None
    pairs: Mapping[str, str]
    removed: tuple[str, ...]
    made: tuple[str, ...]
    changes: tuple[Change, ...]


def pair_stages(
    before: Graph | None, after: Graph | None, removed: Collection[str], made: Collection[str]
) -> Pairing:
    """Pair the graphs before and after a pass.

    Args:
        before: the graph that the region was.
        after: the graph that it is.
        removed: names that rewrites removed.
        made: names that rewrites made.
    """
    if before is None or after is None:
        return _paired(before, after, {})
    pairs = {
        node.name: node.name
        for node in before.nodes.values()
        if node.name in after.nodes
        and _same_place(node, after.nodes[node.name])
        and (node.name not in removed or node.name not in made)
    }
    _pair_equal(before, after, pairs)
    return _paired(before, after, pairs)


def pair_programs(before: Graph | None, after: Graph | None) -> Pairing:
    """Pair graphs of two programs, by structure alone."""
    if before is None or after is None:
        return _paired(before, after, {})
    inputs = {(node.role, node.key): node.name for node in after.inputs}
    pairs = {
        node.name: inputs[node.role, node.key]
        for node in before.inputs
        if (node.role, node.key) in inputs
    }
    results = [next(reversed(graph.nodes)) for graph in (before, after)]
    pairs[results[0]] = results[1]
    _pair_equal(before, after, pairs)
    _pair_in_order(before, after, pairs)
    _pair_equal(before, after, pairs)  # what only now depends on pairs alone: entries of results
    return _paired(before, after, pairs)


def _same_place(before: Node, after: Node) -> bool:
    """Whether a node of the same name may be the same node."""
    return (before.op, before.target, before.role, before.key) == (
        after.op,
        after.target,
        after.role,
        after.key,
    )


def _pair_equal(before: Graph, after: Graph, pairs: dict[str, str]) -> None:
    """Add pairs of calls that compute the same from paired nodes."""
    taken = set(pairs.values())
    ahead: dict[str, list[str]] = defaultdict(list)
    identity = {name: name for name in after.nodes}
    for node in after.calls:
        if node.name not in taken:
            ahead[_call_key(node, identity)].append(node.name)
    for node in before.calls:
        if node.name in pairs or not all(source in pairs for source in node.inputs):
            continue
        candidates = ahead.get(_call_key(node, pairs))
        if candidates:
            pairs[node.name] = candidates.pop(0)


def _pair_in_order(before: Graph, after: Graph, pairs: dict[str, str]) -> None:
    """Add pairs of calls with the same op, constants and module that come in the same order."""
    taken = set(pairs.values())
    left = [node for node in before.calls if node.name not in pairs and node.target != GETITEM]
    right = [node for node in after.calls if node.name not in taken and node.target != GETITEM]
    matcher = difflib.SequenceMatcher(
        None, [*map(_loose_key, left)], [*map(_loose_key, right)], autojunk=False
    )
    for first, second, length in matcher.get_matching_blocks():
        for offset in range(length):
            pairs[left[first + offset].name] = right[second + offset].name


def _call_key(node: Node, names: Mapping[str, str]) -> str:
    return json.dumps([node.target, _renamed([node.args, node.kwargs], names)], sort_keys=True)


def _loose_key(node: Node) -> str:
    return json.dumps([node.target, node.module, constants(node)], sort_keys=True)


def constants(node: Node) -> Any:
    """The arguments with every reference to a node left out."""
    return _renamed([node.args, node.kwargs], defaultdict(str))


def _renamed(value: Any, names: Mapping[str, str]) -> Any:
    if isinstance(value, Mapping):
        if value.keys() == {"n"}:
            return {"n": names[value["n"]]}
        return {key: _renamed(item, names) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_renamed(item, names) for item in value]
    return value


def _paired(before: Graph | None, after: Graph | None, pairs: Mapping[str, str]) -> Pairing:
    taken = set(pairs.values())
    changes = []
    if before is not None and after is not None:
        both = ((before.nodes[old], after.nodes[new]) for old, new in pairs.items())
        changes = [change for old, new in both if (change := _change(old, new, pairs))]
        order = {name: index for index, name in enumerate(after.nodes)}
        changes.sort(key=lambda change: order[change.after])
    return Pairing(
        before,
        after,
        pairs,
        tuple(name for name in _names(before) if name not in pairs),
        tuple(name for name in _names(after) if name not in taken),
        tuple(changes),
    )


def _names(graph: Graph | None) -> Iterable[str]:
    return () if graph is None else graph.nodes


def _change(old: Node, new: Node, pairs: Mapping[str, str]) -> Change | None:
    takes, now = _all_references(old), _all_references(new)
    same_shape = len(takes) == len(now)
    rewired = tuple(
        dict.fromkeys((a, b) for a, b in zip(takes, now, strict=False) if pairs.get(a) != b)
    )
    other = not same_shape or constants(old) != constants(new)
    retyped = old.val != new.val
    if not (rewired or other or retyped):
        return None
    return Change(old.name, new.name, rewired, other, retyped)


def _all_references(node: Node) -> list[str]:
    return list(references([node.args, *node.kwargs.values()]))
