"""Chains of elementwise calls that no fusion took become one op, compiled on the GPU it runs on.

Before::                                        After::

    a, b = split(x, [64, 64], -1)                   y, = dsa.pointwise([x, cos, sin], "…")
    r = dsa.rope_half(a, cos, sin)
    y = cat([r, b], -1)

A chain is a connected set of elementwise calls, of joins and of views between them with at least
two calls that would launch a kernel. It is data in the graph, see ``dsa_compile.ops.pointwise``.

Not for a CPU: its reference runs the calls one by one anyway.
"""

import json
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from dsa_compile.facts.config import GPUS
from dsa_compile.ir.edit import Editor
from dsa_compile.ir.passes import Numerics, RegionPass
from dsa_compile.ir.program import Program
from dsa_compile.ops.pointwise import CALLS

aten, dsa = torch.ops.aten, torch.ops.dsa

_VIEWS = {
    aten.split_with_sizes.default,
    aten.squeeze.dim,
    aten.unsqueeze.default,
    aten.view.default,
    operator.getitem,
}

Chain = set[fx.Node]


class CompilePointwise(RegionPass):
    """Chains of elementwise calls become ``dsa.pointwise``."""

    numerics = Numerics.TOLERANCE
    targets = GPUS

    def rewrite(self, edit: Editor, program: Program) -> None:
        """Replace every chain."""
        for chain in list(_chains(edit.graph)):
            _replace(edit, chain)


def _chains(graph: fx.Graph) -> Iterator[list[fx.Node]]:
    """Maximal chains, each in the order of the graph; no node is in two."""
    chain_of: dict[fx.Node, Chain] = {}
    for node in graph.nodes:
        if not _is_member(node):
            continue
        chain = {node}
        for source in node.all_input_nodes:
            joined = chain | chain_of.get(source, set())
            if joined != chain and _is_convex(joined):
                chain = joined
        chain_of.update(dict.fromkeys(chain, chain))
    order = {node: index for index, node in enumerate(graph.nodes)}
    for chain in {id(chain): chain for chain in chain_of.values()}.values():
        kept = _trimmed(chain)
        members = sorted(kept, key=order.__getitem__)
        launches = [node for node in members if node.target not in _VIEWS]
        if len(launches) > 1 and _is_convex(kept) and _users_follow(members, order):
            yield members


def _is_member(node: fx.Node) -> bool:
    name = "getitem" if node.target is operator.getitem else str(node.target)
    if node.op != "call_function" or name not in CALLS or node.kwargs:
        return False
    if node.target is operator.getitem:
        return _is_member(node.all_input_nodes[0])  # of a split, not of an op with two results
    try:
        _encoded(node.args, dict.fromkeys(node.all_input_nodes, 0))
    except TypeError:
        return False
    return True


def _is_convex(chain: Chain) -> bool:
    """Whether no value leaves the chain and comes back."""
    seen: set[fx.Node] = set()
    stack = [source for node in chain for source in node.all_input_nodes if source not in chain]
    while stack:
        node = stack.pop()
        if node in chain:
            return False
        if node not in seen:
            seen.add(node)
            stack += node.all_input_nodes
    return True


def _trimmed(chain: Chain) -> Chain:
    """Chain without views that are read elsewhere: a result is made by a call that computes."""
    kept = set(chain)
    while outward := {n for n in kept if n.target in _VIEWS and not kept.issuperset(n.users)}:
        kept -= outward
    return kept


def _users_follow(members: list[fx.Node], order: dict[fx.Node, int]) -> bool:
    """Whether one call in the place of the last member comes before everything that reads it."""
    users = {user for node in members for user in node.users} - set(members)
    return all(order[user] > order[members[-1]] for user in users)


def _replace(edit: Editor, members: list[fx.Node]) -> None:
    inside, last = set(members), members[-1]
    inputs = list(
        dict.fromkeys(s for node in members for s in node.all_input_nodes if s not in inside)
    )
    numbers = {node: index for index, node in enumerate([*inputs, *members])}
    results = [node for node in members if not inside.issuperset(node.users)]
    program = {
        "inputs": len(inputs),
        "calls": [[_name(node), _encoded(node.args, numbers)] for node in members],
        "results": [f"%{numbers[node]}" for node in results],
    }
    several = edit.call(dsa.pointwise.default, inputs, json.dumps(program), before=last)
    for index, node in enumerate(results):
        edit.swap(node, edit.call(operator.getitem, several, index, before=last, name=node.name))
    for node in reversed(members):
        edit.erase(node)
    edit.close_site()


def _name(node: fx.Node) -> str:
    return "getitem" if node.target is operator.getitem else str(node.target)


def _encoded(argument: Any, numbers: dict[fx.Node, int]) -> Any:
    match argument:
        case fx.Node():
            return f"%{numbers[argument]}"
        case list() | tuple():
            return [_encoded(entry, numbers) for entry in argument]
        case torch.dtype():
            return str(argument)
        case int() | float() | None:
            return argument
    raise TypeError(argument)
