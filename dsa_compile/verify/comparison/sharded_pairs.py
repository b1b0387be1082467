"""Pairs of calls of an unsharded and a sharded graph, found by what both are computed from.

Names do not tell: cuts make calls anew, and two compilations number theirs apart. Two calls are one
where they call the same op on the same values, in views of whatever sizes; a collective is what it
takes, as all ranks' parts are the whole.
"""

import operator
from collections import defaultdict
from collections.abc import Hashable, Iterator
from typing import Any

from torch import fx

from dsa_compile.ir.match import arguments
from dsa_compile.ir.region import Region
from dsa_compile.ops import ALL_GATHER_MANY, COMBINE, LOCAL, PLACE_EXPERTS, STREAM_OPS
from dsa_compile.ops.library import SIGNATURES

Key = Hashable


def sharded_pairs(whole: Region, sharded: Region) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Pairs of calls, of the unsharded and of the sharded graph, in the order of the latter."""
    numbers: dict[Any, int] = {}
    theirs: dict[Key, list[fx.Node]] = defaultdict(list)
    for key, chain in _values(whole, numbers):
        theirs[key].append(chain[0])
    ours: dict[Key, list[list[fx.Node]]] = defaultdict(list)
    for key, chain in _values(sharded, numbers):
        ours[key].append(chain)
    found = [
        (before, node)
        for key, chains in ours.items()
        if len(chains) == len(theirs.get(key, ()))
        for before, chain in zip(theirs[key], chains, strict=True)
        for node in chain
    ]
    place = {node: number for number, node in enumerate(sharded.graph.nodes)}
    yield from sorted(found, key=lambda pair: place[pair[1]])


def _values(region: Region, numbers: dict[Any, int]) -> Iterator[tuple[Key, list[fx.Node]]]:
    """Each value with what it is computed from, and the collectives behind it."""
    keys: dict[fx.Node, Key] = {}
    chains: dict[fx.Node, list[fx.Node]] = {}
    for node in region.graph.nodes:
        if node.op == "placeholder":
            keys[node] = numbers.setdefault(("input", node.meta["key"]), len(numbers))
        if node.op != "call_function" or node.target in STREAM_OPS:
            continue
        target: Any = node.target
        source: Any = node.args[0] if node.args else None
        if target is ALL_GATHER_MANY:
            continue  # each of its results is a collective of one operand
        gathered = target is operator.getitem and source.target is ALL_GATHER_MANY
        if gathered:
            source = source.args[0][node.args[1]]
        met = gathered or (target in COMBINE and target not in LOCAL)
        if met or target is PLACE_EXPERTS:
            assert isinstance(source, fx.Node)
            keys[node] = keys[source]
            if target is not PLACE_EXPERTS and source in chains:
                chains[source].append(node)
                chains[node] = chains[source]
            continue
        taken = tuple(keys[n] for n in node.all_input_nodes)
        made = (LOCAL.get(target, target), taken, _other_arguments(node))
        keys[node] = numbers.setdefault(made, len(numbers))
        chains[node] = [node]
    done: set[int] = set()
    for node, chain in chains.items():
        if id(chain) not in done:
            done.add(id(chain))
            yield keys[node], chain


def _other_arguments(node: fx.Node) -> tuple[str, ...]:
    """A call's arguments that are no values, but for sizes, which are those of a rank."""
    target: Any = node.target
    if target is not operator.getitem and target not in SIGNATURES:
        return ()
    names, values = arguments(node)
    ours = ("axis", "ranks") if target in COMBINE else ()
    return tuple(
        f"{name}={value}"
        for name, value in zip(names, values, strict=True)
        if name not in ours and not isinstance(value, fx.Node)
    )
