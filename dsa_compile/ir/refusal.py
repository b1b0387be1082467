"""Messages for calls that an op does not take: which operand, what was expected, who made it."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from dsa_compile.errors import CompileError
from dsa_compile.ir.dims import shape_names, size_name
from dsa_compile.ir.pass_record import PassRecord
from dsa_compile.ir.region import Role
from dsa_compile.ir.tensor_info import describe
from dsa_compile.ops.library import SIGNATURES
from dsa_compile.ops.signature import OperandError

_THROUGH = 2  # nodes between a weight and the one that is said to read it


def refused_call(
    pass_name: str,
    path: str,
    call: tuple[Any, Sequence[Any], Mapping[str, Any]],
    error: Exception,
) -> CompileError:
    """The error for a call of a pass that cannot be typed.

    Args:
        pass_name: of the pass.
        path: the module that the call stands for.
        call: operator, arguments and arguments by name, with nodes.
        error: what its fake raised.
    """
    target, args, kwargs = call
    problem = operand_problem(target, args, kwargs)
    if problem is None:
        nodes = _nodes((args, kwargs))
        of = f" of {'; '.join(map(introduce, nodes))}" if nodes else ""
        problem = f"{target}{of} fails: {' '.join(str(error).split()):.200}"
    return CompileError(f"pass {pass_name}: {path or 'top'}: {problem}")


def operand_problem(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    """Reason why an op does not take these nodes and constants; None if it does."""
    try:
        _outcome(target, args, kwargs)
    except OperandError as error:
        given = {**dict(zip(SIGNATURES[target].arguments, args, strict=False)), **kwargs}
        about = [given.get(name) for name in (error.operand, *error.others)]
        return "; ".join((str(error), *map(introduce, _nodes(about))))
    return None


def node_problem(node: fx.Node) -> str | None:
    """Reason why a call in a graph is refused, or has another type than it is marked with."""
    problem = operand_problem(node.target, node.args, node.kwargs)
    if problem is not None:
        return f"cannot be: {problem}"
    made = _outcome(node.target, node.args, node.kwargs)
    value = node.meta["val"]
    marked = value if isinstance(value, tuple | list) else () if value is None else (value,)
    if made is None or made == [(item.dtype, shape_names(item)) for item in marked]:
        return None
    results = ", ".join(f"{str(dtype)[6:]}[{', '.join(sizes)}]" for dtype, sizes in made)
    return f"is marked as {describe(value)!r} but returns {results}"


def _outcome(
    target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[tuple[torch.dtype, tuple[str, ...]]] | None:
    signature = SIGNATURES.get(target)
    if signature is None:
        return None
    args, kwargs = fx.node.map_arg((args, kwargs), lambda node: node.meta["val"])
    given = {**signature.arguments, **dict(zip(signature.arguments, args, strict=False)), **kwargs}
    made = signature.outcome(given, size_name)
    return [(dtype, tuple(map(size_name, shape))) for dtype, shape in made]


def _nodes(arguments: Any) -> list[fx.Node]:
    """The nodes in arguments, each once, in order."""
    found: dict[fx.Node, None] = {}
    fx.node.map_arg(arguments, lambda node: found.setdefault(node))
    return list(found)


def introduce(node: fx.Node) -> str:
    """A node for a message: its name, type, and the pass and site that made it."""
    return f"{node.name} is {describe(node.meta.get('val'))!r}{made_by(node)}"


def made_by(node: fx.Node) -> str:
    """``, made by fuse_add_norm site 3``; empty for a node that no pass made."""
    if "site" not in node.meta:
        return ""
    return f", made by {node.meta['origin']} site {node.meta['site']}"


def weights_read(node: fx.Node) -> list[str]:
    """Keys of the weights that a node reads, itself or through two others at most: the nearest."""
    level = {node}
    for _ in range(_THROUGH + 1):
        read = {source: None for each in level for source in each.all_input_nodes}
        found = [n.meta["key"] for n in read if n.meta.get("role") is Role.WEIGHT]
        if found:
            return sorted(found)
        level = set(read)
    return []


def way_into(records: Sequence[PassRecord]) -> str:
    """Advice on how to look into a program that was refused, to be appended to the error.

    Empty if no pass has run: there is nothing to look into then.

    Args:
        records: of the passes that have run.
    """
    if not records:
        return ""
    return (
        f"; to find a wrong rewrite before it, compile with --stop-after {records[-1].name} "
        "and run dsa-inspect bisect"
    )
