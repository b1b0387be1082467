"""Lineage of the nodes that a rewrite made: the removed nodes that each of them stands for.

A rewrite says which nodes it removed and which it made, not how they correspond. That is worked
out from the graphs, by the first of these that holds for a removed node:

1. Exactly one new node calls an op whose name contains that of its op: ``experts`` became
   ``experts_fp8``.
2. It depends on nothing that the new node does not depend on; the earliest such new node is
   taken: the eight nodes of a norm became ``rms_norm``.
3. It leads to a result that a new node replaces: all new nodes that lead there and stand for
   nothing yet share it.

A new node that still stands for none, and whose value took the place of another, stands for that:
an entry of a split, for one of three projections that became one. The rest was introduced, as the
quantisation in front of an FP8 product is.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from dsa_compile.inspect.diff import Hunk
from dsa_compile.inspect.pairing import Pairing
from dsa_compile.ir.graph import Graph, Node
from dsa_compile.ir.listing import GETITEM


def lineage(hunk: Hunk, pairing: Pairing) -> dict[str, tuple[str, ...]]:
    """Calls that each call of a rewrite stands for, in order; maybe none.

    Args:
        hunk: the rewrite.
        pairing: of the graphs before and after the pass.
    """
    before, after = pairing.before, pairing.after
    if before is None or after is None:
        return {}
    removed = _calls(before, hunk.removed)
    made = _calls(after, hunk.made)
    found: dict[str, list[str]] = {node.name: [] for node in made}
    heads = [node for node in made if not _is_entry(node, found)]
    back = {new: old for old, new in pairing.pairs.items()}
    needs = _dependencies(before, removed, {})
    gives = _dependencies(after, made, back)
    rest = []
    for node in removed:
        alike = [head for head in heads if _names_op(head.op_name, node.op_name)]
        fitting = [
            head for head in heads if needs[node.name] and needs[node.name] <= gives[head.name]
        ]
        if len(alike) == 1:
            found[alike[0].name].append(node.name)
        elif fitting:
            found[fitting[0].name].append(node.name)
        else:
            rest.append(node)
    _share(rest, heads, found, hunk, before, after)
    for node in made:
        if _is_entry(node, found):
            found[node.name] = found[node.inputs[0]]
    for change in hunk.changed:
        for old, new in change.rewired:
            if new in found and not found[new] and old in hunk.removed:
                found[new] = [old]
    return {name: tuple(sources) for name, sources in found.items()}


def _share(
    rest: Sequence[Node],
    heads: Sequence[Node],
    found: dict[str, list[str]],
    hunk: Hunk,
    before: Graph,
    after: Graph,
) -> None:
    """Give removed nodes to new ones by the results that they lead to."""
    left = {node.name for node in rest}
    takers: dict[str, list[str]] = defaultdict(list)
    free = {head.name for head in heads if not found[head.name]}
    for change in hunk.changed:
        for old, new in change.rewired:
            led = _cone(before, old, set(hunk.removed)) & left
            cone = _cone(after, new, set(hunk.made))
            for name in sorted(led):
                takers[name] += [taker for taker in cone & free if taker not in takers[name]]
                if not cone & free and new in found and new not in takers[name]:
                    takers[name].append(new)
    for node in rest:
        for taker in takers[node.name]:
            found[taker].append(node.name)


def _calls(graph: Graph, names: Iterable[str]) -> list[Node]:
    return [graph.nodes[name] for name in names if graph.nodes[name].is_call]


def _is_entry(node: Node, made: Mapping[str, object]) -> bool:
    return node.target == GETITEM and any(name in made for name in node.inputs[:1])


def _names_op(name: str, part: str) -> bool:
    """Whether the words of one op's name hold those of another, side by side."""
    return f"_{part}_" in f"_{name}_"


def _dependencies(
    graph: Graph, inside: Sequence[Node], back: Mapping[str, str]
) -> dict[str, frozenset[str]]:
    """Dependencies of each node outside: paired nodes by one name, weights by module."""
    found: dict[str, frozenset[str]] = {}
    for node in inside:
        known: set[str] = set()
        for source in node.inputs:
            if source in found:
                known |= found[source]
            else:
                given = graph.nodes[source]
                module = given.key.rpartition(".")[0] if given.role == "weight" else given.key
                known.add(module or back.get(source, source))
        found[node.name] = frozenset(known)
    return found


def _cone(graph: Graph, name: str, inside: set[str]) -> set[str]:
    """A node and all it depends on, within some nodes."""
    found: set[str] = set()
    todo = [name]
    while todo:
        each = todo.pop()
        if each in inside and each not in found:
            found.add(each)
            todo += graph.nodes[each].inputs
    return found
