"""Plans cut down to few layers, for faults of the runtime.

All layers have the requests, rows and blocks of a step in common, so a few of them show which of
these are taken.
"""

from collections.abc import Iterable
from dataclasses import replace

from dsa_compile.ir.plan import Plan
from dsa_compile.ir.program import Program
from dsa_compile.ir.region import Role


def first_of_each_kind(plan: Plan) -> Plan:
    """The plan with the first layer of each kind alone."""
    first = {call.kind: call.name for call in reversed(plan.layers)}
    return _with_layers(plan, first.values())


def first_with_caches(plan: Plan, program: Program) -> Plan:
    """The plan with the first two layers, and the first of each kind with caches of its own form.

    What the second layer keeps of a token depends on the tokens before it, what the first keeps
    does not: a block that is taken for one with another prefix shows in the second alone.
    """
    forms = {_caches(program, call.kind): call.name for call in reversed(plan.layers)}
    return _with_layers(plan, {*forms.values(), *(call.name for call in plan.layers[:2])})


def _with_layers(plan: Plan, names: Iterable[str]) -> Plan:
    chosen = set(names)
    kept = (call for call in plan.calls if call.layer is None or call.name in chosen)
    return replace(plan, calls=tuple(kept))


def _caches(program: Program, kind: str) -> frozenset[tuple[object, ...]]:
    """Forms of the caches that a kind of layer takes."""
    return frozenset(
        (node.meta["key"], node.meta["val"].dtype, node.meta["val"].shape[-1])
        for region in program.regions.values()
        if region.kind == kind
        for node in region.inputs_of(Role.CACHE)
    )
