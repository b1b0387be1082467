"""Alterations by planted bugs: weights made wrongly, calls left out, exchanged or moved."""

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from dsa_compile.ir.edit import Editor
from dsa_compile.ir.passes import PassRecord
from dsa_compile.ir.program import Program
from dsa_compile.ir.region import Role
from dsa_compile.passes import overlap_streams
from dsa_compile.passes.flatten_tokens import FlattenTokens
from dsa_compile.weights.plan import Concat, Expr, Load, Narrow
from tests.planted_bugs.planting import (
    node_of,
    planned,
)

aten, dsa = torch.ops.aten, torch.ops.dsa


def replanned(kind: str, key: str, change: Callable[[Expr], Expr]) -> Callable[..., bool]:
    """A weight of a kind is made otherwise, as soon as the plan has it."""

    def alter(edit: Editor, program: Program, *rest: Any) -> bool:
        names = [name for name in rest if isinstance(name, str)]
        planned_now = key in program.weights.entries(kind) and edit.region.kind == kind
        if not planned_now or (names and key not in names):
            return False
        planned(program.weights, kind, key, change)
        return True

    return alter


def of_kind(kind: str, change: Callable[[Editor], None]) -> Callable[..., bool]:
    def alter(edit: Editor, *rest: Any) -> bool:
        if edit.region.kind != kind:
            return False
        change(edit)
        return True

    return alter


def halves_exchanged(expr: Expr) -> Expr:
    """Gate and up rows of every expert."""
    return Concat(1, (Narrow(1, 64, 64, expr), Narrow(1, 0, 64, expr)))


def backwards(expr: Expr) -> Expr:
    assert isinstance(expr, Concat)
    return Concat(expr.dim, expr.parts[::-1])


def of_layer_1(expr: Expr) -> Expr:
    """Expression that gives all layers what layer 1 takes."""
    assert isinstance(expr, Concat)
    parts = [part for part in expr.parts if isinstance(part, Load)]
    return Concat(expr.dim, tuple(Load(p.key.replace("{layer}", "model.layers.1")) for p in parts))


def write_late(edit: Editor) -> None:
    read = node_of(edit, dsa.paged_index_topk.default)
    read.append(node_of(edit, dsa.write_index_cache.default))


def erased(op: Any) -> Callable[[Editor], None]:
    return lambda edit: edit.graph.erase_node(node_of(edit, op))


def positions(edit: Editor) -> fx.Node:
    return edit.input(Role.BATCH, "positions", ("T",), torch.int64)


def same_twice(edit: Editor, op: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """A residual that is what it is added to."""
    return op, (args[0], args[0], *args[2:])


def other_piece(edit: Editor, op: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    return op, (args[0], 1 - args[1])


_flatten = FlattenTokens.run


def flatten_and_exchange(self: FlattenTokens, program: Program, record: PassRecord) -> None:
    _flatten(self, program, record)
    graph = program.regions["moe"].graph
    node = next(n for n in graph.nodes if n.target is dsa.swiglu.default)
    node.args = node.args[::-1]


_waits = overlap_streams.waits


def few_waits(*args: Any) -> dict[int, Any]:
    """Without the waits of one task."""
    needed = dict(_waits(*args))
    needed.pop(max(needed))
    return needed


Q_A = "self_attn.q_a_k_kv_a.weight"
BOTH = "mlp.experts.down_proj_and_shared"
