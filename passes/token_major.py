"""Put tokens before heads everywhere, so that no transpose of activations is left.

Rules, applied until none fits (``T(x)`` is ``transpose(x, 1, 2)``)::

    T(T(x))                     → x
    T(cat([a, b], -1))          → cat([T(a), T(b)], -1)
    T(split(x, sizes, -1)[i])   → split(T(x), sizes, -1)[i]
    T(expand(x, [-1,H,-1,-1]))  → expand(T(x), [-1,-1,H,-1])
    T(view(x, [B,1,S,D]))       → view(x, [B,S,1,D])
    reshape(x, shape of x)      → x
    contiguous(x)               → x

Declines: transposes of other dimensions, and those that meet another operation; the next pass says
so if one of them matters.
"""

import operator
from collections.abc import Callable

import torch
from torch import fx

from dsa_compile.ir.dims import shape_names
from dsa_compile.ir.edit import Editor
from dsa_compile.ir.match import argument, calls
from dsa_compile.ir.passes import RegionPass
from dsa_compile.ir.program import Program

aten = torch.ops.aten
_SPLIT = aten.split_with_sizes.default


class TokenMajor(RegionPass):
    """Move transposes towards the inputs until they cancel."""

    requires = ("recognize_sparse_attention", "recognize_rope_interleaved")

    def rewrite(self, edit: Editor, program: Program) -> None:
        """Apply the rules to a fixed point; each one removes or raises a transpose."""
        while any([_drop_copies(edit), *(_raise(edit, t) for t in _turns(edit.graph))]):
            edit.graph.eliminate_dead_code()
        edit.merge_duplicates()  # every result of a split raised its own transpose


def _turns(graph: fx.Graph) -> list[fx.Node]:
    return [
        node
        for node in calls(graph, aten.transpose.int)
        if node.args[1:] == (1, 2) and node.meta["val"].ndim == 4
    ]


def _drop_copies(edit: Editor) -> bool:
    before = edit.rewrites
    for node in calls(edit.graph, aten.contiguous.default, aten.reshape.default):
        source = node.args[0]
        assert isinstance(source, fx.Node)
        if node.users and shape_names(node.meta["val"]) == shape_names(source.meta["val"]):
            edit.replace(node, source)
    return edit.rewrites > before


def _raise(edit: Editor, turn: fx.Node) -> bool:
    source = turn.args[0]
    assert isinstance(source, fx.Node)
    if not turn.users:
        return False
    rule = _RULES.get(source.target)
    new = rule(edit, turn, source) if rule is not None else None
    if new is None:
        return False
    edit.replace(turn, new)
    return True


def _turned(edit: Editor, node: fx.Node, before: fx.Node) -> fx.Node:
    return edit.call(aten.transpose.int, node, 1, 2, before=before)


def _of_transpose(edit: Editor, turn: fx.Node, source: fx.Node) -> fx.Node | None:
    inner = source.args[0]
    return inner if source.args[1:] == (1, 2) and isinstance(inner, fx.Node) else None


def _of_cat(edit: Editor, turn: fx.Node, source: fx.Node) -> fx.Node | None:
    if argument(source, "dim") not in (-1, 3):
        return None
    parts = source.args[0]
    assert isinstance(parts, list | tuple)
    turned = [_turned(edit, part, turn) for part in parts if isinstance(part, fx.Node)]
    return edit.call(aten.cat.default, turned, -1, before=turn)


def _of_getitem(edit: Editor, turn: fx.Node, source: fx.Node) -> fx.Node | None:
    split, index = source.args
    if not isinstance(split, fx.Node) or split.target is not _SPLIT:
        return None
    whole, sizes = split.args[:2]
    if argument(split, "dim") not in (-1, 3) or not isinstance(whole, fx.Node):
        return None
    pieces = edit.call(_SPLIT, _turned(edit, whole, turn), sizes, -1, before=turn)
    return edit.call(source.target, pieces, index, before=turn)


def _of_expand(edit: Editor, turn: fx.Node, source: fx.Node) -> fx.Node | None:
    inner, sizes = source.args
    assert isinstance(inner, fx.Node)
    assert isinstance(sizes, list | tuple)
    order = [sizes[0], sizes[2], sizes[1], sizes[3]]
    return edit.call(aten.expand.default, _turned(edit, inner, turn), order, before=turn)


def _of_view(edit: Editor, turn: fx.Node, source: fx.Node) -> fx.Node | None:
    inner, sizes = source.args
    assert isinstance(sizes, list | tuple)
    if len(sizes) != 4 or sizes[1] != 1:
        return None  # only a dimension of one moves without moving data
    order = [sizes[0], sizes[2], sizes[1], sizes[3]]
    return edit.call(aten.view.default, inner, order, before=turn)


_RULES: dict[object, Callable[[Editor, fx.Node, fx.Node], fx.Node | None]] = {
    aten.transpose.int: _of_transpose,
    aten.cat.default: _of_cat,
    aten.expand.default: _of_expand,
    aten.view.default: _of_view,
    operator.getitem: _of_getitem,
}
