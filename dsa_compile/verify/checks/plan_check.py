"""Check what plans say beside graphs: whose caches and weights a call has, and what a step runs.

Rewrites are compared layer by layer, each on caches and weights of its own, so a plan that gives
one layer's to another shows in none of them.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from dsa_compile.ir.plan import Call, Plan
from dsa_compile.ir.program import Program
from dsa_compile.ir.region import Role
from dsa_compile.weights.expr import bound
from dsa_compile.weights.plan import WeightEntry, WeightPlan
from dsa_compile.weights.sharing import weight_homes

PLAN = "plan"
"""The name of the plan among what is wrong with a program."""


def plan_problems(program: Program) -> Iterator[str]:
    """Problems of plans: caches or weights of another call, or calls left out; sentences."""
    caching = {r.kind for r in program.regions.values() if r.inputs_of(Role.CACHE)}
    for name, plan in program.plans.items():
        yield from (f"plan {name}: {problem}" for problem in _cache_problems(plan, caching))
    yield from _layers_of_two_caches(program.plans, caching)
    yield from _weight_problems(program)


def _cache_problems(plan: Plan, caching: set[str]) -> Iterator[str]:
    owners: dict[str, int | None] = {}
    for call in plan.calls:
        if call.kind not in caching:
            continue
        if call.caches is None:
            yield f"{call.name} writes caches and has none"
        elif owners.setdefault(call.caches, call.layer) != call.layer:
            yield (
                f"{call.name} writes its rows to the caches of {call.caches}, "
                f"which layer {owners[call.caches]} has"
            )
        if call not in plan.writing:
            yield f"a step without results leaves out {call.name}, which writes caches"


def _layers_of_two_caches(plans: Mapping[str, Plan], caching: set[str]) -> Iterator[str]:
    """Layers that a plan runs on other caches than another plan, whose rows it so never sees."""
    first: dict[int, Call] = {}
    for call in (call for plan in plans.values() for call in plan.layers if call.kind in caching):
        if call.layer is None or call.caches is None:
            continue
        other = first.setdefault(call.layer, call)
        if other.caches != call.caches:
            yield (
                f"layer {call.layer} has the caches of {call.caches} in {call.name} and those of "
                f"{other.caches} in {other.name}: what one writes the other does not read"
            )


def _weight_problems(program: Program) -> Iterator[str]:
    calls = {call.name: call for call in program.calls}
    for name, own in weight_homes(program.calls, program.weights).items():
        for key, home in own.items():
            mine = _made(program.weights, calls[name].kind, key, calls[name].vars)
            theirs = _made(program.weights, calls[home.call].kind, home.key, calls[home.call].vars)
            if mine != theirs:
                yield (
                    f"weight {key} of {name} is loaded as {home.key} of {home.call}, "
                    "which is made otherwise"
                )


def _made(plan: WeightPlan, kind: str, key: str, variables: Mapping[str, str]) -> WeightEntry:
    entry = plan.entries(kind)[key]
    return replace(entry, expr=bound(entry.expr, variables))
