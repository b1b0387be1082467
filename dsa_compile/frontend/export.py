"""``torch.export`` of one region, and its graph as a :class:`Region`.

Exported without a cache: positions already carry offsets, and a cache layout is a compiler's
choice, inserted later by a pass. Non-strict mode, automatic dynamic sizes and no guards: the guards
export finds (``min(index_topk, S)``) are false restrictions for a paged runtime.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._dynamo import config as dynamo_config
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim

from dsa_compile.ir.dims import FakeWorld
from dsa_compile.ir.region import Region, Role

# Example sizes for tracing; any two that differ and exceed 1 do.
_EXAMPLE = {"B": 2, "S": 40}
# Inputs that no region takes once attention is recognised.
_PASSING = ("causal_mask",)
# What export writes as the path of the nodes that read sizes of inputs, which no module made.
_NO_MODULE = "_empty_nn_module_stack_from_metadata_hook"
# A frame of a stack trace in the code that says what the model computes: the reference model and
# the modules around it, not torch's own modules that these call.
_FRAME = re.compile(r'File ".*?((?:transformers|dsa_compile)/[^"]*)", line (\d+)')


@dataclass(frozen=True)
class Input:
    """One input of a region to trace. String sizes are dynamic."""

    role: Role
    key: str
    shape: tuple[int | str, ...]
    dtype: torch.dtype


def export_region(
    kind: str,
    module: torch.nn.Module,
    inputs: tuple[Input, ...],
    outputs: tuple[str, ...],
    mode: FakeTensorMode,
    world: FakeWorld,
    wanted: Collection[str] | None = None,
) -> Region:
    """Trace ``module`` and type the graph in ``world``.

    Weight placeholders get the parameter's name inside the module as their key. ``outputs`` are the
    names of what the module returns; the region returns those that are ``wanted``; None: all.
    """
    with mode:
        examples = tuple(
            torch.empty([_EXAMPLE[s] if isinstance(s, str) else s for s in i.shape], dtype=i.dtype)
            for i in inputs
        )
    dynamic = tuple(
        {d: Dim.DYNAMIC for d, size in enumerate(i.shape) if isinstance(size, str)} for i in inputs
    )
    # export types calls in a mode of its own, which is faster without a cache, too: see fake_mode()
    no_cache = dynamo_config.patch(fake_tensor_cache_enabled=False)
    with mode, torch.no_grad(), no_cache:
        exported = torch.export.export(module, examples, dynamic_shapes=dynamic, strict=False)
    signature = exported.graph_signature
    weights = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    given = dict(zip(signature.user_inputs, inputs, strict=True))
    kept = tuple(index for index, name in enumerate(outputs) if wanted is None or name in wanted)
    graph = _convert(exported, weights, given, world, kept)
    return Region(kind, graph, tuple(outputs[index] for index in kept))


def _convert(
    exported: torch.export.ExportedProgram,
    weights: Mapping[str, str],
    given: Mapping[object, Input],
    world: FakeWorld,
    kept: Sequence[int],
) -> fx.Graph:
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in exported.graph.nodes:
        if node.op == "output":
            results = node.args[0]
            assert isinstance(results, tuple)
            graph.output(tuple(copies[results[index]] for index in kept))
            continue
        if node.op == "placeholder":
            copies[node] = _placeholder(graph, node, weights, given, world)
            continue
        if node.target is torch.ops.aten._assert_tensor_metadata.default:
            continue  # export's own checks of what it traced; they hold no computation
        if node.target is torch.ops.aten.sym_size.int:
            node.args = _lasting(node, given)
        copy = copies[node] = graph.node_copy(node, lambda n: copies[n])
        copy.meta = {
            "path": _module_path(node),
            "origin": "export",
            "source": _source(node),
            "val": world.evaluate(copy.target, copy.args, copy.kwargs),
        }
    for node in list(graph.nodes):
        if node.op == "placeholder" and not node.users:
            graph.erase_node(node)
    graph.lint()
    return graph


def _lasting(node: fx.Node, given: Mapping[object, Input]) -> tuple[Any, ...]:
    """Input that stays and has a size of one that passes remove: where to read the size."""
    of, dim = node.args
    assert isinstance(of, fx.Node)
    assert isinstance(dim, int)
    taken = given.get(of.name)
    if taken is None or taken.key not in _PASSING:
        return node.args
    inputs = {n.name: n for n in node.graph.nodes if n.op == "placeholder"}
    for name, other in given.items():
        if other.key not in _PASSING and taken.shape[dim] in other.shape:
            return inputs[str(name)], other.shape.index(taken.shape[dim])
    return node.args


def _placeholder(
    graph: fx.Graph,
    node: fx.Node,
    weights: Mapping[str, str],
    given: Mapping[object, Input],
    world: FakeWorld,
) -> fx.Node:
    if node.name in weights:
        key = weights[node.name].removeprefix("layer.")
        role, shape, dtype = Role.WEIGHT, tuple(node.meta["val"].shape), node.meta["val"].dtype
    else:
        source = given[node.name]
        key, role, shape, dtype = source.key, source.role, source.shape, source.dtype
    made = graph.placeholder(key.replace(".", "_"))
    made.meta = {
        "role": role, "key": key, "path": "", "origin": "export", "val": world.tensor(shape, dtype),
    }  # fmt: skip
    return made


def _module_path(node: fx.Node) -> str:
    """Path of the module that made a node, relative to the region: ``self_attn.q_a_proj``."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path: str = list(stack.values())[-1][0]
    if path == _NO_MODULE:
        return ""
    return path.removeprefix("layer").removeprefix(".")


def _source(node: fx.Node) -> str:
    """Line of code that made a node, as ``transformers/models/…/modeling_….py:104``; or ""."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    return ":".join(frames[-1]) if frames else ""
