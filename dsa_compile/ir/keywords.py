"""Positional arguments of a call that are written by keyword where people read it.

They are those from the first constant on: ``router(x, weight, bias, n_group=8, topk_group=4, …)``.
The first argument and lists say what they are.
"""

import keyword
from functools import cache

from torch import fx
from torch._ops import OpOverload


def keywords(node: fx.Node) -> tuple[str, ...]:
    """Names of a call's last positional arguments: those to write by keyword."""
    if not isinstance(node.target, OpOverload):
        return ()
    for index, value in enumerate(node.args):
        if index and not isinstance(value, fx.Node | list | tuple):
            return _parameters(node.target)[index : len(node.args)]
    return ()


@cache
def _parameters(op: OpOverload) -> tuple[str, ...]:
    names = tuple(argument.name for argument in op._schema.arguments)
    assert not any(map(keyword.iskeyword, names)), op
    return names
