"""Names for the nodes of a finished graph that say what they hold.

While passes run, nodes keep the names they were born with, so that diffs show rewrites and nothing
else. What is stored for good is named anew::

    getitem_33, getitem_35 = split_with_sizes(linear_default_11, [48, 32], dim=-1)   before
    q_a_kv_a_0, q_a_kv_a_1 = split_with_sizes(q_a_kv_a, [48, 32], dim=-1)            after
"""

import operator

import torch
from torch import fx

from dsa_compile.ir.region import Region, Role

_PARAMETERS = ("weight", "bias", "e_score_correction_bias")
_SPLITS = frozenset(
    {
        torch.ops.aten.split.Tensor,
        torch.ops.aten.split_with_sizes.default,
        torch.ops.aten.unbind.int,
    }
)


def with_readable_names(region: Region) -> Region:
    """A copy whose calls are named after what they compute; inputs keep their names.

    A call that takes the parameters of one module is named after the module (``q_a_proj``), any
    other after its op (``rope_half``), an entry as the op's schema calls it (``residual_out``) or
    after its source and its number. ``meta["was"]`` is
    the name before, where it differs.
    """
    graph = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    # inputs first: their names must not be taken by a call
    for node in region.inputs():
        new[node] = graph.placeholder(node.name)
    for node in region.graph.nodes:
        if node.op == "call_function":
            args, kwargs = fx.map_arg((node.args, node.kwargs), new.__getitem__)
            name = _base_name(node, new)
            new[node] = graph.create_node(node.op, node.target, args, kwargs, name)
        elif node.op == "output":
            new[node] = graph.output(fx.map_arg(node.args[0], new.__getitem__))
        else:
            assert node.op == "placeholder", f"region {region.name}: a region has no {node.op}"
        new[node].meta = dict(node.meta)
        if new[node].name != node.name:
            new[node].meta["was"] = node.name
    return Region(region.name, graph, region.outputs)


def _base_name(node: fx.Node, new: dict[fx.Node, fx.Node]) -> str:
    if node.target is operator.getitem and isinstance(source := node.args[0], fx.Node):
        if name := _result_name(source.target, node.args[1]):
            return name
        if source.target in _SPLITS and isinstance(whole := source.args[0], fx.Node):
            source = whole
        return f"{new[source].name}_{node.args[1]}"
    modules = {_module(source) for source in node.all_input_nodes} - {None}
    if len(modules) == 1:
        return str(modules.pop())
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.name.rpartition("::")[2]
    return node.name


def _result_name(target: object, index: object) -> str:
    """Name of one of an op's results in its schema; empty if it has none."""
    if not isinstance(target, torch._ops.OpOverload) or not isinstance(index, int):
        return ""
    returns = target._schema.returns
    return str(returns[index].name or "") if index < len(returns) else ""


def _module(node: fx.Node) -> str | None:
    """``"q_a_proj"`` for the input ``self_attn.q_a_proj.weight``; None if it is no parameter."""
    *parents, last = str(node.meta.get("key", "")).split(".")
    is_parameter = node.meta.get("role") == Role.WEIGHT and last in _PARAMETERS
    return parents[-1] if is_parameter and parents else None
