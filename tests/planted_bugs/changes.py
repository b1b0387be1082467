"""Ways to be wrong: alterations of calls that passes insert, of graphs, weights and plans."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from dsa_compile.ir.edit import Editor
from dsa_compile.ir.plan import Call, Plan
from dsa_compile.ir.program import Program
from dsa_compile.ir.region import Role
from dsa_compile.weights.plan import Concat, Expr, WeightEntry, WeightPlan
from tests.planted_bugs.faults import Fault
from tests.planted_bugs.planting import (
    Args,
    Change,
    Plant,
    inserting,
    is_call,
    operator_named,
    result,
)


# Calls that a pass inserts.
def altered(index: int, change: Callable[[Any], Any]) -> Change:
    """An argument is what ``change`` makes of it."""
    return lambda edit, op, args: (op, (*args[:index], change(args[index]), *args[index + 1 :]))


def scaled(index: int, factor: float) -> Change:
    """A number among the arguments is another."""
    return altered(index, lambda value: value * factor)


def negated(index: int) -> Change:
    """A flag among the arguments is the other."""
    return altered(index, lambda flag: not flag)


def swapped(i: int, j: int) -> Change:
    """Two arguments change places."""

    def change(edit: Any, op: Any, args: Args) -> tuple[Any, Args]:
        made = list(args)
        made[i], made[j] = made[j], made[i]
        return op, tuple(made)

    return change


def given(index: int, value: Any) -> Change:
    """An argument is another; ``value`` may be a function of the editor."""

    def change(edit: Any, op: Any, args: Args) -> tuple[Any, Args]:
        new = value(edit) if callable(value) else value
        return op, (*args[:index], new, *args[index + 1 :])

    return change


def called(other: str) -> Change:
    """Another operator takes the arguments."""
    return lambda edit, op, args: (operator_named(other), args)


def taking_args(change: Callable[..., Args]) -> Change:
    """The arguments are what ``change(*arguments)`` gives."""
    return lambda edit, op, args: (op, tuple(change(*args)))


def where(test: Callable[[Any, Args], bool], change: Change) -> Change:
    """A change that is made where ``test(edit, arguments)`` holds."""
    return lambda edit, op, args: change(edit, op, args) if test(edit, args) else (op, args)


def same_twice(edit: Any, op: Any, args: Args) -> tuple[Any, Args]:
    """What is added is the second operand, twice."""
    return op, (args[1], args[1], *args[2:])


def size(node: fx.Node, dim: int) -> int:
    return int(node.meta["val"].shape[dim])


def wrong(
    id: str,
    about: str,
    name: str,
    op: str,
    change: Any,
    region: str = "",
    path: str = "",
    **given: Any,
) -> Fault:
    """A fault of a pass that inserts calls of ``op`` wrongly."""
    plant = inserting(name, op, change, region=region, path=path)
    return Fault(id, about, plant, name.split()[0], **given)


# Graphs.
def node_of(edit: Editor, op: str) -> fx.Node:
    """The first call of an operator in a region."""
    return next(node for node in edit.graph.nodes if is_call(node.target, op))


def input_of(key: str) -> Callable[[Editor], fx.Node]:
    """The region's input of that key."""
    return lambda edit: next(n for n in edit.region.inputs() if n.meta["key"] == key)


def positions(edit: Editor) -> fx.Node:
    return edit.input(Role.BATCH, "positions", ("T",), torch.int64)


def of_kind(kind: str, change: Callable[[Editor], None]) -> Callable[..., bool]:
    """For :func:`~tests.planted_bugs.planting.afterwards`: changes regions of a kind or all."""

    def alter(edit: Editor, *rest: Any) -> bool:
        if kind and edit.region.kind != kind:
            return False
        change(edit)
        return True

    return alter


def late(first: str, then: str) -> Callable[[Editor], None]:
    """The first call of ``first`` stands behind that of ``then``."""
    return lambda edit: node_of(edit, then).append(node_of(edit, first))


def erased(op: str) -> Callable[[Editor], None]:
    """Without the first call of an operator."""
    return lambda edit: edit.graph.erase_node(node_of(edit, op))


# Weights.
def planned(plan: WeightPlan, kind: str, key: str, change: Callable[[Expr], Expr]) -> None:
    """Make a weight of a plan in another way."""
    entry = plan.remove(kind, key)
    plan.define(kind, key, WeightEntry(entry.dtype, entry.shape, change(entry.expr)))


def replanned(kind: str, key: str, change: Callable[[Any], Expr]) -> Callable[..., bool]:
    """A weight of a kind is made otherwise, as soon as the plan has it."""

    def alter(edit: Editor, program: Program, *rest: Any) -> bool:
        names = [name for name in rest if isinstance(name, str)]
        planned_now = key in program.weights.entries(kind) and edit.region.kind == kind
        if not planned_now or (names and key not in names):
            return False
        planned(program.weights, kind, key, change)
        return True

    return alter


def backwards(expr: Concat) -> Expr:
    return replace(expr, parts=expr.parts[::-1])


# Plans, and programs as they are exported.
def replan(place: str, name: str, change: Callable[[Call], Call]) -> Plant:
    """Calls of a plan are others, whose function gives a plan, or several by name."""

    def plan(found: Plan) -> Plan:
        return replace(found, calls=tuple(map(change, found.calls)))

    def of(found: Any, *_: Any) -> Any:
        if not isinstance(found, Mapping):
            return plan(found)
        return {key: plan(each) if key == name else each for key, each in found.items()}

    return result(place, of)


def call_with(match: Callable[[Call], bool], **strings: str) -> Callable[[Call], Call]:
    """Calls that match make the names of their weights of other strings."""
    return lambda call: replace(call, vars=call.vars | strings) if match(call) else call


def exported(change: Callable[[Program], None]) -> Plant:
    """The exported program is changed in place: its plans and regions are its own."""

    def made(program: Program, *_: Any) -> Program:
        program = program.fork(program.config)
        change(program)
        return program

    return result("frontend.build.build_program", made)
