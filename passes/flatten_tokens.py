"""Drop the batch dimension: ``[B, S, …]`` becomes ``[T, …]``.

Before::                                    After::

    v = view(x, [B, S, -1, 192])                v = view(x, [-1, 128, 192])
    p = split(v, [128, 64], -1)                 p = split(v, [128, 64], -1)
    m = view(h, [-1, 7168])                     (h)

Until the paged caches come, the flat tokens are one sequence, which the dense ops take as well.
Symbolic sizes disappear: every view names its static sizes and leaves the tokens to -1.

Refuses: a value whose tokens are not in front (``token_major`` should have put them there), a call
that works along the batch or the sequence.
"""

from typing import Any

import torch
from torch import fx

from dsa_compile.errors import CompileError
from dsa_compile.ir.dims import FakeWorld, shape_names
from dsa_compile.ir.match import arguments
from dsa_compile.ir.passes import Pass, PassRecord
from dsa_compile.ir.program import Program
from dsa_compile.ir.region import Region, Role

aten = torch.ops.aten

_VIEWS = (aten.view.default, aten.reshape.default)
# Arguments that number dimensions, in the operators that have them.
_DIM_ARGUMENTS = ("dim", "dim0", "dim1")
_LEADING = 2  # the batch and the sequence, which become one dimension


class FlattenTokens(Pass):
    """Rebuild every region over one leading token dimension."""

    requires = ("broadcast_outer_product", "token_major", "absorb_mla")

    def run(self, program: Program, record: PassRecord) -> None:
        """Rebuild every region at once: values flow between regions."""
        for name, region in program.regions.items():
            if any("B" in shape_names(node.meta["val"]) for node in region.inputs()):
                record.by_region[name] = _flatten(region, program.world)


def _flatten(region: Region, world: FakeWorld) -> int:
    graph = fx.Graph()
    copies: dict[fx.Node, Any] = {}
    changed = 0
    for node in region.graph.nodes:
        if node.op == "placeholder":
            copies[node] = _placeholder(graph, node, world)
        elif node.op == "output":
            graph.output(tuple(copies[result] for result in node.args[0]))
        elif node.target is not aten.sym_size.int:
            same = fx.node.map_arg((node.args, node.kwargs), lambda n: copies.get(n))
            args, kwargs = _shift(node, *same)
            needless = node.target in _VIEWS and _same_shape(args[0], args[1])
            changed += needless or (args, kwargs) != same
            if needless:
                copies[node] = args[0]
                continue
            copies[node] = copy = graph.create_node(node.op, node.target, args, kwargs, node.name)
            copy.meta = {**node.meta, "val": world.evaluate(node.target, args, kwargs)}
    region.graph = graph
    return changed


def _placeholder(graph: fx.Graph, node: fx.Node, world: FakeWorld) -> fx.Node:
    copy = graph.placeholder(str(node.target))
    copy.meta = dict(node.meta)
    if node.meta["role"] is not Role.WEIGHT:
        sizes = _leading(node)
        copy.meta["val"] = world.tensor(("T", *sizes), node.meta["val"].dtype)
    return copy


def _leading(node: fx.Node) -> tuple[int, ...]:
    """The static sizes behind the tokens of a value, [B, S, …] or [B*S, …]."""
    names = shape_names(node.meta["val"])
    skip = 2 if names[:2] == ("B", "S") else 1 if names[:1] == ("B*S",) else 0
    rest = tuple(node.meta["val"].shape[skip:])
    if not skip or not all(isinstance(size, int) for size in rest):
        raise CompileError(
            f"pass flatten_tokens: {node.meta['path']}: node {node.name} has shape "
            f"[{', '.join(names)}]; tokens must come first"
        )
    return rest


def _shift(node: fx.Node, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Arguments of the flat call: static sizes for views, one dimension less elsewhere."""
    if node.target in _VIEWS:
        return (args[0], [-1, *_leading(node)]), {}
    if node.target is aten.expand.default:
        return (args[0], [-1, *args[1][2:]]), {}
    rank = _batched_rank(node)
    if rank is None:
        return args, kwargs

    def moved(name: str, arg: Any) -> Any:
        if name not in _DIM_ARGUMENTS:
            return arg
        if isinstance(arg, list | tuple):
            return [moved(name, dim) for dim in arg]
        if (arg if arg >= 0 else arg + rank) < _LEADING:
            raise CompileError(
                f"pass flatten_tokens: {node.meta['path']}: node {node.name} works along the batch "
                f"or the sequence ({name}={arg}); tokens of all requests share one dimension"
            )
        return arg if arg < 0 else arg - 1

    names, _ = arguments(node)
    args = tuple(moved(name, arg) for name, arg in zip(names, args, strict=False))
    return args, {name: moved(name, arg) for name, arg in kwargs.items()}


def _batched_rank(node: fx.Node) -> int | None:
    """Dimensions that a call on a [B, S, …] tensor may number; None for any other tensor."""
    value = node.all_input_nodes[0].meta["val"] if node.all_input_nodes else None
    if not isinstance(value, torch.Tensor) or shape_names(value)[:_LEADING] != ("B", "S"):
        return None
    return value.ndim + (node.target is aten.unsqueeze.default)


def _same_shape(source: fx.Node, sizes: list[int]) -> bool:
    return tuple(source.meta["val"].shape[1:]) == tuple(sizes[1:])
