"""Cutting a part of a graph over ranks: weights, and what is computed from them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from dsa_compile.facts.layout import TP
from dsa_compile.ir.edit import Editor
from dsa_compile.ir.match import Match
from dsa_compile.ir.program import Program
from dsa_compile.weights.plan import Shard, WeightEntry
from dsa_compile.weights.ranks import shards

dsa = torch.ops.dsa


@dataclass(frozen=True)
class Cut:
    """Cut of a weight into equal parts.

    Attributes:
        weight: an input of the region.
        dim: the dimension that is cut.
        stacked: pieces along it that are cut each on its own, such as gate and up.
        axis: of the layout, whose ranks have a part each.
    """

    weight: fx.Node
    dim: int
    stacked: int = 1
    axis: str = TP


def compute_part(
    edit: Editor,
    program: Program,
    cuts: Sequence[Cut],
    m: Match,
    sizes: Mapping[fx.Node, Sequence[int]] | None = None,
) -> fx.Node | None:
    """Begin a site: give each rank its parts of weights, and let it compute from them.

    Every call between the weights and the root of a match is made anew, as its values are others
    now; those that were there stay until nothing uses them.

    Args:
        edit: of the region.
        program: for the layout and the plan.
        cuts: the weights.
        m: the site; its root is the last call to be made anew.
        sizes: new sizes of views among the calls.

    Returns:
        What stands for the root on one rank: its part of the columns, or of a sum. None where the
        site is declined.
    """
    for cut in cuts:
        key = cut.weight.meta["key"]
        if any(shards(program.weights.entries(edit.region.kind)[key].expr)):
            edit.decline(m, f"{key} is cut already")
            return None
    depending = _between([cut.weight for cut in cuts], m.root)
    inside = set(depending)
    for node in depending:
        outside = [user.name for user in node.users if user not in inside and node is not m.root]
        if outside:
            edit.decline(m, f"{node.name} is used by {outside[0]} too, which is not cut")
            return None
    edit.begin_site()
    for cut in cuts:
        _keep_part(edit, program, cut)
    made: dict[fx.Node, fx.Node] = {}
    for node in depending:
        given: Any = fx.node.map_arg((node.args, node.kwargs), lambda n: made.get(n, n))
        args, kwargs = given
        if sizes and node in sizes:
            args = (args[0], list(sizes[node]))
        made[node] = edit.call(node.target, *args, before=node, name=node.name, **kwargs)
    return made[m.root]


def all_reduce(edit: Editor, program: Program, root: fx.Node, part: fx.Node) -> None:
    """End a site: the sum of the parts of a lane's ranks stands for the root."""
    ranks = program.config.layout.tp
    if ranks == 1:
        edit.replace(root, part)
        return
    edit.replace(root, edit.call(dsa.all_reduce.default, part, TP, ranks, before=root))


def all_gather(edit: Editor, program: Program, root: fx.Node, part: fx.Node) -> None:
    """End a site: the columns of all ranks, side by side, stand for the root."""
    ranks = program.config.layout.tp
    edit.replace(root, edit.call(dsa.all_gather.default, part, TP, ranks, before=root))


def _between(weights: Sequence[fx.Node], root: fx.Node) -> list[fx.Node]:
    """Calls that depend on weights, in order, as far as the root."""
    reached: set[fx.Node] = set(weights)
    found = []
    for node in root.graph.nodes:
        if node.op == "call_function" and not reached.isdisjoint(node.all_input_nodes):
            reached.add(node)
            found.append(node)
        if node is root:
            return found
    raise AssertionError(root)


def _keep_part(edit: Editor, program: Program, cut: Cut) -> None:
    kind, key = edit.region.kind, cut.weight.meta["key"]
    entry = program.weights.remove(kind, key)
    ranks = program.config.layout.along(cut.axis)
    length, rest = divmod(entry.shape[cut.dim], ranks * cut.stacked)
    assert rest == 0, (key, entry.shape, ranks)  # see check_layout
    shape = tuple(
        length * cut.stacked if dim == cut.dim else size for dim, size in enumerate(entry.shape)
    )
    expr = Shard(cut.axis, ranks, cut.dim, length, entry.expr, cut.stacked)
    program.weights.define(kind, key, WeightEntry(entry.dtype, shape, expr))
    edit.retype(cut.weight, shape, entry.torch_dtype)
